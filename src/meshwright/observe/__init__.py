"""What happened: traces of ranks, and what they say."""
