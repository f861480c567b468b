"""Messages between the ranks of a group, each with a time limit.

- `agreement`: check that all ranks of a group are present, with equal settings
- `failure`: the error for a lost peer, on which all ranks agree
- `join`: connect the ranks of a group
- `message`: messages, with a head and a body
- `wire`: transfers between a few ranks
"""
