"""Megatron-LM's script after the one-liner: ``python tests/npu/pretrain_gpt.py CHECKOUT FLAGS``.

Processes that a job spawns run the one-liner as well, as if it were in the script itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the checkout's script in the checkout; its Megatron-core takes precedence over an installed one."""
    checkout = sys.argv.pop(1)
    sys.path.insert(0, checkout)
    os.chdir(checkout)
    import mindspeed_dsa.megatron_adaptor  # noqa: F401

    script = Path(checkout, "pretrain_gpt.py")
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    import mindspeed_dsa.megatron_adaptor  # noqa: F401
