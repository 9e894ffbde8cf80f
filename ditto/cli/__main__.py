"""`python -m ditto.cli`: the same as the `ditto` command."""

from ditto.cli.main import main

if __name__ == "__main__":
    main()
