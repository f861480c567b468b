"""Device time by module of the model.

- `backward`: which forward call backward work belongs to
- `modules`: which part of a model the device worked for
"""
