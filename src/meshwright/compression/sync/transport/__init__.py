"""Messages between the ranks of a group, each with a time limit.

- `agreement`: all processes of a group must be there, and want the same
- `failure`: what is said when a peer is lost, and how all processes come to say the same
- `join`: how processes find each other
- `message`: what travels
- `wire`: messages between a few processes
"""
