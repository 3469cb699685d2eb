from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from mindspeed_dsa import log
from mindspeed_dsa.ops.backend import choose
from mindspeed_dsa.ops.npu import device as npu_device

_HERE = f"{Path(__file__).parent}{os.sep}"  # a path's own comparison takes seconds for all items


def pytest_collection_modifyitems(config, items):
    """Replace all tests here by one skip without torch_npu; with it nothing may be skipped."""
    if find_spec("torch_npu") is not None:
        return
    here = [item for item in items if str(item.path).startswith(_HERE)]
    if here:
        here[0].add_marker(pytest.mark.skip(reason="tests/npu: torch_npu is not installed; make test-npu"))
        config.hook.pytest_deselected(items=here[1:])
        left_out = set(here[1:])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def npu_kernels(monkeypatch):
    """Let CPU tensors through to torch_npu's operators, which compute on them; yield the calls."""
    from tests.npu import kernel_parts, kernels

    kernels.register()
    monkeypatch.setattr(logging.getLogger(log.NAME), "propagate", True)  # caplog listens at the root
    monkeypatch.setattr(npu_device, "takes_device", lambda device: device == "cpu")
    monkeypatch.setattr("torch.npu.get_device_name", lambda device=None: "Ascend910B3")
    npu_device.product.cache_clear()
    choose.cache_clear()
    log.forget()
    kernel_parts.calls.clear()
    yield kernel_parts.calls
    npu_device.product.cache_clear()
    choose.cache_clear()
    log.forget()
