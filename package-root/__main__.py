"""``python -m ddltrace``: runs the command line."""

from ddltrace.cli import main

if __name__ == "__main__":
    main()
