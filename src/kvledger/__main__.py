"""`python -m kvledger` is the `kvledger` command."""

import sys

from kvledger.cli import main

if __name__ == "__main__":
    sys.exit(main())
