"""A rank's time: steps, busy and idle parts, stretches bound by the host.

- `breakdown`: shares of a rank's time
- `host_bound`: stretches in which a device idles because its host has not issued work
- `steps`: steps of a training loop, as its host marks them
- `windows`: steps on a device, end to end
"""
