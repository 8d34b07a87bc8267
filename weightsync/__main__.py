"""``python -m weightsync``: the same as the ``weightsync`` command."""

from weightsync.cli.app import main

if __name__ == "__main__":
    main()
