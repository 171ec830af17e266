"""`python -m hvd_gradcomp` is the command `hvd-gradcomp`."""

import sys

from hvd_gradcomp.cli import main

if __name__ == "__main__":
    sys.exit(main())
