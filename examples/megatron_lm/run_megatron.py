"""Run a script of a Megatron-LM checkout, unedited, with mindspeed_dsa armed before its first line.

    python run_megatron.py MEGATRON_LM/pretrain_gpt.py ARGUMENTS...
    torchrun --nproc-per-node 8 run_megatron.py MEGATRON_LM/pretrain_gpt.py ARGUMENTS...

It has the effect of the line ``import mindspeed_dsa.megatron_adaptor`` at the top of the script.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module

USAGE = "usage: run_megatron.py SCRIPT [ARGUMENTS OF SCRIPT]...; SCRIPT is e.g. Megatron-LM/pretrain_gpt.py"


def main() -> None:
    """Remove this launcher from ``sys.argv`` and ``sys.path``, arm the patches, run the script."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(USAGE)
    script = os.path.abspath(sys.argv[1])
    if not os.path.isfile(script):
        sys.exit(f"run_megatron.py: there is no script {script}; {USAGE}")
    # As if Python had been started with the script: its folder, with the checkout's `megatron` package, comes
    # first on the path instead of this one.
    sys.argv[:] = [script, *sys.argv[2:]]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(script), *(entry for entry in sys.path if os.path.abspath(entry) != here)]

    try:
        from mindspeed_dsa.patches.errors import REFUSED, MindSpeedDSAError, say_once
    except ModuleNotFoundError as error:
        sys.exit(f"run_megatron.py: {error}; install it with: pip install 'mindspeed_dsa[megatron]'")
    try:
        import_module("mindspeed_dsa.megatron_adaptor")
        runpy.run_path(script, run_name="__main__")
    except MindSpeedDSAError as error:  # its message names the remedy; a traceback would bury it
        say_once(f"{os.path.basename(script)}: {error}")
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
