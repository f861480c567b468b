"""The folder of a run: its lock, events and checkpoints.

- `checkpoint`: checkpoints
- `checks`: one message for each way in which a run's folder or a disk is refused
- `events`: events that a run reports
- `folder`: the folder of a run
- `lock`: the lock of a run's folder
"""
