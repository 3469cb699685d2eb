"""The platform interface of swap, recompute and overlap, and the choice of a platform."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time

import pytest
import torch

from mindspeed_dsa import platforms
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms import host_pool
from tests.support.memory import fresh_memory

MIB = 1 << 20


@pytest.fixture
def cpu() -> platforms.Platform:
    return platforms.get("cpu")


def test_the_package_loads_no_torch():
    code = "import sys, mindspeed_dsa.platforms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auto_takes_the_cpu_where_there_is_nothing_else(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(platforms, "find_spec", lambda name: None)
    assert platforms.detect() == "cpu"


def test_auto_prefers_a_gpu_to_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(platforms, "find_spec", lambda name: None)
    assert platforms.detect() == "cuda"
    assert platforms.detect("cpu") == "cpu"


def test_a_platform_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"cuda was asked for.*--mindspeed-platform auto"):
        platforms.detect("cuda")


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(SettingsError, match="'tpu' is unknown; choose from auto, cpu, cuda, npu"):
        platforms.detect("tpu")


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_npu_without_torch_npu_says_what_to_install():
    assert not platforms.get("npu").is_available()
    with pytest.raises(SettingsError, match="torch_npu is not installed; install the torch_npu release"):
        platforms.prepare("npu")


def test_prepare_makes_it_the_current_platform(monkeypatch):
    monkeypatch.setattr(platforms, "_current", None)
    assert platforms.prepare("cpu") is platforms.current() is platforms.get("cpu")


def test_memory_figures_follow_what_the_process_holds(cpu):
    cpu.reset_peak_memory()
    before = cpu.memory()
    held = fresh_memory(64 * MIB)
    during = cpu.memory()
    assert 60 * MIB < during.current - before.current < 80 * MIB
    assert during.peak >= during.current
    assert before.total == during.total > during.free
    del held
    after = cpu.memory()
    assert after.current < during.current - 60 * MIB
    assert after.peak > during.current - MIB


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process reset its peak")
def test_the_peak_starts_again(cpu):
    fresh_memory(64 * MIB)
    high = cpu.memory().peak
    cpu.reset_peak_memory()
    assert cpu.memory().peak < high - 60 * MIB


def test_figures_without_a_proc_file_system_are_an_upper_bound(cpu, monkeypatch):
    monkeypatch.setattr(host_pool, "_kilobytes", lambda path, key: None)
    memory = cpu.memory()
    assert memory.current == memory.peak > 10 * MIB
    assert 0 < memory.free < memory.total


def test_events_measure_milliseconds(cpu):
    start, end = cpu.new_event(timing=True), cpu.new_event(timing=True)
    begin = time.perf_counter()
    start.record()
    time.sleep(0.02)
    end.record()
    assert 20 <= start.elapsed_time(end) <= 1e3 * (time.perf_counter() - begin)
    assert end.query()


def test_events_without_timing_or_record_cannot_be_compared(cpu):
    start, end = cpu.new_event(), cpu.new_event(timing=True)
    start.record()
    end.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(end)
    with pytest.raises(ValueError, match="two recorded events"):
        cpu.new_event(timing=True).elapsed_time(end)


def test_the_stream_of_a_block_is_current_inside_it_only(cpu):
    default, side, inner = cpu.current_stream(), cpu.new_stream(), cpu.new_stream()
    with cpu.use_stream(side):
        assert cpu.current_stream() is side
        with pytest.raises(RuntimeError, match="from inside"), cpu.use_stream(inner):
            raise RuntimeError("from inside")
        assert cpu.current_stream() is side
    assert cpu.current_stream() is default


def test_an_async_copy_is_complete_at_its_event(cpu):
    source = torch.arange(6.0).view(2, 3)
    buffer = cpu.empty_pinned(source.shape, source.dtype)
    cpu.copy_async(buffer, source).synchronize()
    assert torch.equal(buffer, source)
    assert buffer.data_ptr() != source.data_ptr()
    assert buffer.device == cpu.device


def test_a_forked_process_keeps_host_memory_as_it_was(cpu):
    """A child that writes a checkpoint reads it while the parent's next step changes it."""
    buffer = cpu.empty_pinned(4, torch.float32).fill_(1.0)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)
        os._exit(int(buffer[0].item()))
    buffer.fill_(2.0)
    os.write(tell, b".")
    _, status = os.waitpid(child, 0)
    os.close(told), os.close(tell)
    assert os.waitstatus_to_exitcode(status) == 1


def test_the_description_names_device_and_memory(cpu):
    facts = platforms.describe("cpu")
    assert facts["device"]
    assert facts["backend"] == "gloo"
    assert facts["memory_total_bytes"] > facts["memory_free_bytes"] > 0
