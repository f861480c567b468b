"""Signals, heartbeats and time limits of a run.

- `heartbeat`: heartbeats of the ranks, in the store through which they met
- `stop_signals`: signals that ask a run to stop
- `watchdog`: the watchdog of one process of a run
"""
