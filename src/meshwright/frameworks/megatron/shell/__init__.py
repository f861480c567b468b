"""Megatron-LM arguments in a shell script: parsing, variables, finding them.

- `find_arguments`: where arguments stand in a file
- `parse`: words of a shell script, and the statements that they make
- `run`: words of the command that a shell script runs
"""
