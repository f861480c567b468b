"""Events of a watch: written, read, shown and compared.

- `compare`: where two ranks part ways
- `events`: events of a watch, one JSON object per line, and how streams of several ranks are read as one
- `perfetto`: events as a Chrome trace, which Perfetto and chrome://tracing show
- `rank`: which rank is this process? What its launcher says, else torch.distributed, else its number among processes
- `stream`: where events go
- `text`: events as lines for people
"""
