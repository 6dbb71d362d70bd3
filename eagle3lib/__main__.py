"""`python -m eagle3lib`: see cli.py."""

import sys

from eagle3lib.cli import main

if __name__ == "__main__":
    sys.exit(main())
