"""Pinned memory of CUDA, with a stand-in for its runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_dsa import platforms
from mindspeed_dsa.platforms.cuda import CudaPlatform
from mindspeed_dsa.platforms.host_pool import HostFigures, HostPool


class Runtime:
    """Stand-in for ``torch.cuda.cudart()``."""

    def __init__(self) -> None:
        self.error = 0
        self.pinned: dict[int, int] = {}
        self.last = b""
        self.idle = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.error == 0:
            self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert self.idle, "a copy may be under way"
        self.last = ctypes.string_at(address, self.pinned.pop(address))  # dies if unmapped by now
        return 0


class Cuda(CudaPlatform):
    """CUDA platform without a GPU."""

    def __init__(self) -> None:
        self.runtime = Runtime()
        self.current = self.copies_run_on = 3

    def _synchronize(self) -> None:
        self.runtime.idle = self.current == self.copies_run_on

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    @property
    def _module(self) -> Any:
        return SimpleNamespace(
            cudart=lambda: self.runtime,
            synchronize=self._synchronize,
            current_device=lambda: self.current,
            device=self._on,
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    platform = Cuda()
    monkeypatch.setattr(platforms, "_current", platform)
    return platform


def test_as_many_bytes_are_pinned_as_are_asked_for(cuda):
    tensor = cuda.empty_pinned((3, 1000), torch.float32)
    assert tensor.shape == (3, 1000)
    assert cuda.runtime.pinned == {tensor.data_ptr(): 12000}
    view = tensor.fill_(1)[1:]
    cuda.current = 0  # as in a thread of one's own, which may drop the last reference
    del tensor
    assert view.sum() == 2000
    assert len(cuda.runtime.pinned) == 1
    del view
    assert cuda.runtime.pinned == {}
    assert cuda.runtime.last == 3000 * b"\0\0\x80\x3f"
    assert cuda.empty_pinned(0, torch.float32).shape == (0,)


def test_torchs_pinned_memory_is_counted_as_torch_rounds_it(cuda):
    cuda.runtime.error = 801  # cudaErrorNotSupported
    pool, empty, asked = HostPool(), torch.empty, []

    def pinning(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        asked.append((size, pin_memory))
        return empty(*size, **options)

    with mock.patch.object(torch, "empty", pinning):
        kept = pool.keep(5000, owner=pool)
        buffer = pool.take(5000)
    assert asked == [((8192,), True)] * 2
    assert kept.shape == buffer.tensor.shape == (5000,)
    assert pool.figures() == HostFigures(in_use=16384, held=16384)
    buffer.give_back()
    assert pool.figures() == HostFigures(in_use=8192, held=16384)
    with mock.patch.object(torch._C, "_host_emptyCache", create=True) as release:
        pool.release_kept()
    assert pool.figures() == HostFigures(in_use=8192, held=8192)
    release.assert_called_once_with()
    assert cuda.runtime.pinned == {}
