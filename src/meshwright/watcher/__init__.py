"""Live watching of a program: which calls run and what they change, as one stream of events per rank."""
