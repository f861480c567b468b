"""What all tests share, those in docstrings of src/ too: CPU-seconds by room."""

pytest_plugins = ("tests.cpu_shares",)
