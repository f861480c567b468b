"""The folder of a run: its lock, events and checkpoints.

- `checkpoint`: checkpoints
- `checks`: one message for each thing that a run's folder or a disk refuses
- `events`: what a run reports
- `hold`: the folder of a run
- `lock`: the lock of a run's folder
"""
