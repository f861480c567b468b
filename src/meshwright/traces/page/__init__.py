"""Reports of an analysis: text for a terminal, HTML pages, tables and timelines."""
