"""``python -m ddltrace``: the same as the console script."""

from ddltrace.cli import main

if __name__ == "__main__":
    main()
