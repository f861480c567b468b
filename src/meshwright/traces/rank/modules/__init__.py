"""Device time by module of the model.

- `backward`: the forward call of backward work
- `modules`: device time by part of the model
"""
