"""How do other frameworks say it? A plan as files that they run unchanged, and their configurations as plans."""
