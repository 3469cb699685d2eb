from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.platforms.host_pool import HostFigures, HostPool, size_class


class Later:
    """Event of a copy that is still running."""

    done = False

    def query(self):
        return self.done


@given(st.integers(1, 2**45))
def test_a_size_class_holds_its_bytes_and_wastes_at_most_a_fifth(nbytes):
    size = size_class(nbytes)
    assert size >= max(nbytes, 4096)
    assert size == 4096 or size - nbytes <= size / 5
    assert size_class(size) == size


def test_bytes_are_counted_and_buffers_used_again():
    pool = HostPool()
    first, second = pool.take(5000), pool.take(100)
    assert pool.figures() == HostFigures(in_use=5120 + 4096, held=5120 + 4096)
    address = first.tensor.data_ptr()
    first.give_back()
    assert pool.figures() == HostFigures(in_use=4096, held=5120 + 4096)
    again = pool.take(5001)
    assert again.tensor.data_ptr() == address
    assert again.tensor.shape == (5001,)
    again.give_back()
    second.give_back()
    pool.release_kept()
    assert pool.figures() == HostFigures(in_use=0, held=0)
    assert not pool.holds(again.tensor)


def test_exact_buffers_are_not_rounded_up():
    pool = HostPool()
    assert pool.take(5001, exact=True).tensor.shape == (5001,)
    assert pool.figures().held == 5001


def test_a_buffer_is_not_handed_out_under_a_copy():
    pool, event = HostPool(), Later()
    buffer = pool.take(8192)
    address = buffer.tensor.data_ptr()
    buffer.give_back(after=event)
    assert pool.figures().in_use == 8192
    other = pool.take(8192)
    assert other.tensor.data_ptr() != address
    event.done = True
    assert pool.take(8192).tensor.data_ptr() == address
    assert pool.figures() == HostFigures(in_use=16384, held=16384)


def test_the_pool_knows_its_tensors():
    pool = HostPool()
    numbers = pool.take(4 * 6).tensor.view(torch.float32).view(2, 3)
    numbers.fill_(1.5)
    assert pool.holds(numbers[1:].T)
    assert not pool.holds(torch.ones(3))
    assert numbers.sum() == 9.0


def test_host_memory_of_a_cpu_does_not_come_from_torchs_allocator():
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        host = HostPool().take(1 << 20)
        device = torch.empty(1 << 18)
    assert sum(event.self_cpu_memory_usage for event in profile.function_events) == device.nbytes
    assert host.tensor.nbytes == device.nbytes


def test_too_little_host_memory_is_told_with_the_figure_needed(monkeypatch):
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: 3 << 30)
    host_pool.require_host_memory(3 << 30, "swap-optimizer", "use more ranks")
    with pytest.raises(SettingsError, match=r"^swap-optimizer: needs 4\.00 GiB .* has 3\.00 .* use more"):
        host_pool.require_host_memory(4 << 30, "swap-optimizer", "use more ranks")


def test_every_process_of_the_host_is_counted(monkeypatch):
    """With 500 GiB, 8 processes get 62 GiB each, in any order."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(host_pool, "shared", HostPool())
    monkeypatch.setattr(host_pool, "_free_at_start", 500 << 30)
    for taken in (0, 7 * 62):
        monkeypatch.setattr(host_pool, "host_memory_free", lambda taken=taken: (500 - taken) << 30)
        host_pool.require_host_memory(62 << 30, "swap-optimizer", "use more ranks")
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: 500 << 30)
    with pytest.raises(SettingsError, match=r"needs 72\.00 GiB .* in 8 processes .* 576\.00 .* 500\.00 "):
        host_pool.require_host_memory(72 << 30, "swap-optimizer", "use more ranks")
    monkeypatch.setattr(host_pool.shared, "_held", 1 << 30)
    with pytest.raises(SettingsError, match=r"needs 62\.00 GiB .* 504\.00 GiB with what they hold"):
        host_pool.require_host_memory(62 << 30, "swap-optimizer", "use more ranks")


def test_a_pool_that_grows_asks_for_itself_alone(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(host_pool, "_free_at_start", 0)
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: 8192)
    assert HostPool().take(8192).tensor.shape == (8192,)


def test_what_is_kept_in_other_size_classes_goes_when_memory_is_short(monkeypatch):
    pool, free = HostPool(), 8192
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: free - pool._held)
    first, second = pool.take(4096), pool.take(4096)
    first.give_back()
    with pytest.raises(SettingsError, match=r"^host pool, .*needs"):
        pool.take(8192)
    second.give_back()
    del first, second
    assert pool.take(8192).tensor.shape == (8192,)
    assert pool.figures() == HostFigures(in_use=8192, held=8192)


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    system = host_pool.host_memory_free()
    monkeypatch.setattr(host_pool, "_CGROUP", str(tmp_path))
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 30\n")
    assert host_pool.host_memory_free() == pytest.approx(system, rel=0.2)
    (tmp_path / "memory.max").write_text("1000\n")
    assert host_pool.host_memory_free() == 530


def test_a_cpu_has_what_is_sent_to_it():
    numbers = torch.arange(3)
    assert host_pool.upload(numbers, torch.device("cpu")) is numbers
    assert host_pool.upload(numbers, torch.device("meta")).device.type == "meta"
    assert host_pool.download(numbers)() is numbers
