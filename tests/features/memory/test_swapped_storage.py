"""Whom the allocator is told of that a storage is read by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.features.memory import swap_attention_layers
from mindspeed_dsa.features.memory import swap_attention_limits as limits
from mindspeed_dsa.features.memory.swap_attention_pass import LayerPass
from mindspeed_dsa.features.memory.swapped_storage import SwappedStorage
from mindspeed_dsa.platforms.cpu import CpuPlatform, CpuStream
from tests.features.memory.swap_cases import in_use


class Told(CpuPlatform):
    """Streams that storages were recorded for, with address and bytes."""

    def __init__(self) -> None:
        self.streams: list[CpuStream] = []
        self.readers: list[tuple[int, int, int]] = []

    def new_stream(self) -> CpuStream:
        self.streams.append(CpuStream())
        return self.streams[-1]

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.readers.append((self.streams.index(stream), tensor.data_ptr(), tensor.nbytes))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    platform = Told()
    monkeypatch.setattr(platforms, "_current", platform)
    return platform


@pytest.mark.parametrize("of_any_stream", [False, True])
def test_the_copy_to_the_host_keeps_memory_of_other_streams(told, of_any_stream):
    x = torch.randn(8, 8).requires_grad_()
    layer_pass = LayerPass("layer 1", 0, iter(()), of_any_stream=of_any_stream)
    with layer_pass.whole_layer(), layer_pass.hooks():
        between = 2 * x
        y = between[2:].sin()
    to_host = 0
    assert told.readers == [(to_host, between.data_ptr(), 256)] * of_any_stream
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient[2:].equal(2 * (2 * x[2:]).cos())


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_context_parallel_layers_allocate_on_any_stream(told, monkeypatch, context_parallel):
    class Layer(torch.nn.Module):
        layer_number = 1
        config = SimpleNamespace(context_parallel_size=context_parallel)

        def __init__(self) -> None:
            super().__init__()
            self.self_attention = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax(-1))

        def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
            return (self.self_attention(hidden_states),)

    monkeypatch.setattr(swap_attention_layers, "host", lambda name: SimpleNamespace())
    monkeypatch.setattr(limits, "min_bytes", lambda: 0)
    monkeypatch.setattr(limits, "modules", lambda: ("self_attention",))
    layer = Layer()
    swap_attention_layers._choose(layer)
    output = swap_attention_layers.swap_in_layer(Layer.forward)(layer, torch.randn(8, 8).requires_grad_())
    assert len(told.readers) == (context_parallel > 1) * 2, "what both modules save"
    del output


def test_another_stream_that_reads_what_has_come_back_keeps_it(told):
    tensor = torch.arange(64.0)
    swapped = SwappedStorage(tensor.untyped_storage())
    swapped.leave()
    del tensor
    swapped.come_back()
    back = swapped.on_device()
    assert told.readers == [], "the stream that it was allocated for"
    with told.use_stream(told.new_stream()):
        assert swapped.on_device().data_ptr() == back.data_ptr()
    assert told.readers == [(len(told.streams) - 1, back.data_ptr(), 256)]
    assert torch.empty(0).set_(back).equal(torch.arange(64.0))
    del swapped
    assert in_use() == 0
