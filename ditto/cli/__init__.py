"""The `ditto` command: look at runs, take them up, decide what only a person can. Start at `main.py`."""
