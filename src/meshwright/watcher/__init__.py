"""A live watch: which calls run and what they change, one stream of events per rank."""
