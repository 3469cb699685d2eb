"""The NPU platform with the real torch_npu, in separate processes: its redirection cannot be undone."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest

from tests.npu.device import launch


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


REFUSED = """
import pytest
from mindspeed_dsa import platforms
from mindspeed_dsa.patches.errors import SettingsError
assert platforms.detect() == "cpu"
with pytest.raises(SettingsError, match=DETECT):
    platforms.detect("npu")
with pytest.raises(SettingsError, match=PREPARE):
    platforms.prepare("npu")
"""


def test_torch_npu_that_sees_no_device():
    refusals = "DETECT = 'torch sees no such device'; PREPARE = 'sees no NPU; install the CANN toolkit'"
    _, told = run(f"{refusals}\n{REFUSED}")
    assert "going on without" not in told


def test_torch_npu_without_cann():
    refusal = "torch_npu .* does not load .libhccl.so: cannot open.*install the CANN toolkit"
    _, told = run(f"DETECT = PREPARE = {refusal!r}\n{REFUSED}", LD_LIBRARY_PATH="")
    assert "does not load (libhccl.so" in told
    assert "going on without the NPU" in told


def test_prepare_redirects_torch_cuda_to_the_npu():
    run("""
import torch, torch_npu
from mindspeed_dsa import platforms
torch.npu.is_available = lambda: True
assert platforms.detect() == platforms.detect("npu") == "npu"
assert platforms.prepare("npu", needed=False).name == "npu"
assert not torch.cuda.is_available()
assert platforms.prepare("npu") is platforms.current()
assert torch.cuda.is_available()
assert torch.cuda.current_device.__module__.startswith("torch_npu")
""")


def test_megatron_finds_the_generators_of_the_device(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import torch
from mindspeed_dsa import platforms
platforms.prepare("npu")
torch.ones(1, device="npu")
assert torch.cuda.default_generators[0] is torch.npu.default_generators[0]
""")
    launch.run(script).require_success()


@pytest.mark.parametrize(("given", "told"), [("", "(8, 0)"), ("9.5", "(9, 5)")])
def test_a_device_has_a_capability(given, told):
    run(
        f"""
import os
if not {given!r}:
    os.environ.pop("TORCH_NPU_DEVICE_CAPABILITY", None)
import torch, torch_npu
from mindspeed_dsa import platforms
torch.npu.is_available = lambda: True
platforms.prepare("npu")
assert str(torch.cuda.get_device_capability()) == {told!r}
""",
        TORCH_NPU_DEVICE_CAPABILITY=given,
    )


def test_describe_asks_torch_npu():
    run(
        """
import torch, torch_npu
from mindspeed_dsa import platforms
torch.npu.get_device_name = lambda: "Ascend910B"
torch.npu.mem_get_info = lambda: (30, 64)
torch.npu.memory_allocated, torch.npu.max_memory_allocated = lambda: 5, lambda: 7
facts = platforms.describe("npu")
assert facts.pop("limits")["tensor parallel ranks of MC2"] == "2, 4, 8"
assert facts.pop("environment")["TASK_QUEUE_ENABLE"] == "2"
assert facts.pop("CANN") == "unknown: neither ASCEND_TOOLKIT_HOME nor ASCEND_HOME_PATH is set"
assert facts == {
    "device": "Ascend910B", "backend": "hccl", "memory_total_bytes": 64, "memory_free_bytes": 30,
    "product": "Atlas A2",
}
from mindspeed_dsa.tools.cli import doctor
lists = {name: [] for name in ("megatron", "beside", "environment", "features", "sites", "problems")}
findings = {"versions": {}, "layers": "", **lists}
told = doctor.as_text({**findings, "platform": platforms.describe("npu")}).splitlines()
assert "  limits:" in told and "    tensor parallel ranks of MC2: 2, 4, 8" in told
assert "    TASK_QUEUE_ENABLE: 2" in told
torch.npu.get_device_name = lambda: "Ascend310P3"
assert platforms.describe("npu")["product"] == "unknown product"
memory = platforms.get("npu").memory()
assert (memory.current, memory.peak) == (5, 7)
""",
        TASK_QUEUE_ENABLE="2",
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("current_device", {}),
        ("get_device_name", {}),
        ("current_stream", {}),
        ("stream", {"stream": None}),
        ("synchronize", {}),
        ("mem_get_info", {}),
        ("memory_allocated", {}),
        ("max_memory_allocated", {}),
        ("reset_peak_memory_stats", {}),
    ],
)
def test_torch_npu_has_what_the_platform_calls(name, arguments):
    import torch
    import torch_npu  # noqa: F401

    inspect.signature(getattr(torch.npu, name)).bind(**arguments)


def test_streams_and_events_of_torch_npu():
    import torch
    import torch_npu  # noqa: F401

    for owner, methods in (
        (torch.npu.Stream, ("wait_stream", "wait_event", "record_event", "synchronize")),
        (torch.npu.Event, ("record", "wait", "query", "synchronize", "elapsed_time")),
    ):
        assert all(callable(getattr(owner, method)) for method in methods)
    inspect.signature(torch.npu.Event.__new__).bind(torch.npu.Event, enable_timing=True)
