"""The stand-ins of ``tests/npu`` in place of an NPU: torch_npu's own schemas, its operators on CPU tensors.

A process that has them shows that the programs here run through torch_npu's dispatcher; no figure of it says
anything about a device.
"""

from __future__ import annotations

import os

ASKED_FOR = "NPU_STAND_INS"
"""Set in the environment of a process that is to have them."""


def environment() -> dict[str, str]:
    """Return the environment in which torch_npu loads without CANN; builds the libraries once.

    Raises:
        SystemExit: torch_npu is not installed, or ``nm`` or ``gcc`` is missing.
    """
    from tests.npu import stubs

    folders = [str(stubs.build()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {ASKED_FOR: "1", "LD_LIBRARY_PATH": os.pathsep.join(folders)}


def install() -> None:
    """Let CPU tensors through to torch_npu's operators for the rest of this process."""
    import torch
    import torch_npu
    from torch_npu.op_plugin.meta import _meta_registrations

    from mindspeed_dsa.ops import backend
    from mindspeed_dsa.ops.npu import device as npu_device
    from tests.npu import kernels

    kernels.register()
    npu_device.takes_device = lambda device: device == "cpu"
    backend.PREFERENCE["cpu"] = backend.PREFERENCE["npu"]
    # What torch_npu's part of torch.optim asks for, among others.
    torch.npu.current_device = lambda: 0
    torch.npu.get_device_name = lambda device=None: "Ascend910B3"
    # A shape function asks the device for its kind, once, for a warning.
    _meta_registrations._npu_fusion_attention_warning_printed = True
    assert torch_npu
