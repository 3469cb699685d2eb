"""Command of the soak: ``python -m tests.soak --minutes 60``."""

import sys

from tests.soak.soaking import main

if __name__ == "__main__":
    sys.exit(main())
