"""What was found, told: words for a terminal, pages, tables, timelines."""
