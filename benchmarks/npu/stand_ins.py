"""The stand-in device of ``tests/npu/device`` in place of an NPU: the real torch_npu, values by CPU kernels.

A process that has it shows that the programs here run on tensors of the device's type; no figure of it says
anything about a device.
"""

from __future__ import annotations

ASKED_FOR = "NPU_STAND_INS"
"""Set in the environment of a process that is to have it."""


def environment() -> dict[str, str]:
    """Return the environment in which torch_npu finds two NPUs; builds the libraries once.

    Raises:
        SystemExit: torch_npu is not installed, or ``nm`` or ``gcc`` is missing.
    """
    from tests.npu.device import launch

    return {ASKED_FOR: "1", **launch.environment(devices=2)}


def install() -> None:
    """Give tensors of this process on the NPU their values."""
    from tests.npu.device import mode

    mode.start()


def messages(folder: str) -> dict[str, str]:
    """Return the variables with which ranks exchange their messages through a folder."""
    return {"STAND_IN_HCCL": folder}
