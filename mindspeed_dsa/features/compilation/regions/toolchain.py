"""What torch.compile needs beside torch to make code for a device."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec


def missing(device_type: str) -> str | None:
    """What is missing for code for a device, and what to install; ``None`` if it is all there."""
    if device_type == "cpu":
        named = os.environ.get("CXX", "g++")
        if shutil.which(named) is None:
            return f"there is no C++ compiler ({named}); install g++, or name one in CXX"
        return None
    if device_type == "npu":
        if find_spec("torch_npu") is None or find_spec("torch_npu._inductor") is None:
            return (
                "this torch_npu has no code generator for torch.compile; install one that has, and "
                "triton-ascend"
            )
        return None
    if find_spec("triton") is None:
        return "there is no Triton; pip install triton"
    named = os.environ.get("CC", "gcc")
    if shutil.which(named) is None:
        return (
            f"there is no C compiler ({named}), which Triton builds its launchers with; install gcc, or name "
            "one in CC"
        )
    return None
