"""The processes of a run: started or joined, and what each of them does.

- `launch`: start the processes of a plan on this machine, or join those that a launcher has started
- `threads`: how many threads a process computes with on processors
- `worker`: one process of a run
"""
