"""Import and export for other frameworks: a plan as files that they run, and their configurations as plans."""
