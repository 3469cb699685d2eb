"""Stand-in device of ``tests/npu/device`` for an NPU: the real torch_npu, with values from CPU kernels.

It shows that the programs here run on tensors of the device's type; its figures say nothing about a device.
"""

from __future__ import annotations

ASKED_FOR = "NPU_STAND_INS"
"""Environment variable that requests the stand-in in a process."""


def environment() -> dict[str, str]:
    """Return the environment in which torch_npu finds two NPUs; builds the libraries once.

    Raises:
        SystemExit: torch_npu is not installed, or ``nm`` or ``gcc`` is missing.
    """
    from tests.npu.device import launch

    return {ASKED_FOR: "1", **launch.environment(devices=2)}


def install() -> None:
    """Compute this process's tensors on the NPU with CPU kernels."""
    from tests.npu.device import mode

    mode.start()


def messages(folder: str) -> dict[str, str]:
    """Return variables that make ranks exchange their messages through a folder."""
    return {"STAND_IN_HCCL": folder}
