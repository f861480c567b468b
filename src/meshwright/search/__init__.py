"""Which choice is best? The strategy space, the exact search, and what explains its answer."""
