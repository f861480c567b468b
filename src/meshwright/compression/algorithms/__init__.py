"""One algorithm per file, found by its name: `encode` and `decode`, whose keywords are its options."""
