"""What happened? Traces of profilers, and a live watch inside a program."""
