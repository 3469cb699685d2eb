"""Megatron-LM's script behind the one line: ``python tests/npu/pretrain_gpt.py CHECKOUT FLAGS``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the checkout's script in the checkout, whose Megatron-core comes before an installed one."""
    checkout = sys.argv.pop(1)
    sys.path.insert(0, checkout)
    os.chdir(checkout)
    import mindspeed_dsa.megatron_adaptor  # noqa: F401

    runpy.run_path(str(Path(checkout, "pretrain_gpt.py")), run_name="__main__")


if __name__ == "__main__":
    main()
