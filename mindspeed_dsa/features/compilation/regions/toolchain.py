"""What torch.compile needs beside torch to make code for a device."""

from __future__ import annotations

import os
import platform
import shutil
from functools import cache
from importlib.util import find_spec
from typing import Any


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


@cache
def settings(device_type: str) -> dict[str, Any]:
    """Settings of Inductor's that spare it finding out what is known here.

    For x86 it builds and loads a program for every set of vector instructions that the processor has, longer
    than it compiles a region, and takes the first that works. Here that one alone is tried.
    """
    if device_type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return {}
    from torch._inductor import config, cpu_vec_isa

    flags = cpu_vec_isa.x86_isa_checker()
    known = [
        each
        for each in cpu_vec_isa.supported_vec_isa_list
        if all(flag in flags for flag in str(each).split())
    ]
    if config.cpp.vec_isa_ok is not None or not known or not known[0]:
        return {}
    return {"cpp.vec_isa_ok": True}
