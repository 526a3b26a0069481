"""`python -m geoflow_fast` is the `geoflow` command, so that torchrun can start it."""

from geoflow_fast.cli import main

if __name__ == "__main__":
    main()
