"""Find and parse Megatron-LM arguments in a shell script.

- `find_arguments`: arguments in a file
- `parse`: words of a shell script, and its statements
- `run`: words of the command that a shell script runs
"""
