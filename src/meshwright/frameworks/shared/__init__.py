"""What several frameworks have in common.

- `config_fields`: a user's configuration, read field by field
- `fsdp`: fSDP2's grid and ZeRO: replicas x shards x ring
- `launch_command`: how many processes a user starts, and with which command
- `nearest_plan`: what a framework has no words for, replaced by the nearest that it has
- `texts`: small texts that several formats write
- `uniform_plan`: the plans that other frameworks know
"""
