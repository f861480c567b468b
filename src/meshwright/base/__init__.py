"""Small modules that every room uses.

- `files`: reading with precise errors, writing without half-written files
- `native`: C that is built once and kept
- `parallel`: independent work on all cores
- `processes`: processes started from a user's script, and inspected
- `tables`: tables of JSON and TOML to typed structs
- `units`: numbers as people read them
- `version`: the release
"""
