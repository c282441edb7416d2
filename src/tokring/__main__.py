"""`python -m tokring` is the program `tokring`."""

import sys

from tokring.cli import main

if __name__ == "__main__":
    sys.exit(main())
