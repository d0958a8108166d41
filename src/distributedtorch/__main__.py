"""`python -m distributedtorch` is `dtorch`."""

import sys

from distributedtorch.cli import main

if __name__ == "__main__":
    sys.exit(main())
