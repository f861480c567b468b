"""The ranks of a run: started here or joined from a launcher.

- `launch`: start the ranks of a plan on this machine, or join those that a launcher has started
- `threads`: number of CPU threads of a rank
- `worker`: one rank of a run
"""
