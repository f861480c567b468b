"""Events of a watch: written, read, shown and compared.

- `compare`: the first difference between two ranks
- `events`: events as one JSON object per line, and merged streams of several ranks
- `perfetto`: events as a Chrome trace, which Perfetto and chrome://tracing show
- `rank`: the rank of this process: its launcher's number, else torch.distributed's, else its number among processes
- `stream`: output of events
- `text`: events as lines for people
"""
