"""Search for the best plan: the strategy space, the exact search, and the explanation of its answer."""
