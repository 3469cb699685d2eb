"""``python -m tests.npu.device SCRIPT ARGUMENTS``: run a script of one rank on the stand-in.

``tests/npu/device/launch.py`` starts ranks and sets their environment.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.npu.device import mode


def main() -> None:
    """Start the mode, then run the script as ``__main__``."""
    mode.start()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
