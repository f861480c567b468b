"""Parts that several frameworks share.

- `config_fields`: a user's configuration, read field by field
- `fsdp`: FSDP2's grid and ZeRO: replicas x shards x ring
- `launch_command`: number of processes, and the command that starts them
- `nearest_plan`: replacements for choices that a framework cannot express
- `texts`: small texts that several formats write
- `uniform_plan`: plans that other frameworks know
"""
