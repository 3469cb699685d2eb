"""The allocator learns of every stream that reads a swapped storage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_dsa import log, platforms
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.memory.swap_attention import layer_pass as swap_layers
from mindspeed_dsa.features.memory.swap_attention.feature import Options
from mindspeed_dsa.features.memory.swap_attention.layer_pass import LayerPass
from mindspeed_dsa.features.memory.swap_attention.swapped_storage import SwappedStorage
from mindspeed_dsa.platforms.cpu import CpuPlatform, CpuStream
from tests.features.memory.swap_attention.counted_copies import in_use


class Recorded(CpuPlatform):
    """Platform that records streams for storages, with address and bytes."""

    def __init__(self) -> None:
        self.streams: list[CpuStream] = []
        self.readers: list[tuple[int, int, int]] = []

    def new_stream(self) -> CpuStream:
        self.streams.append(CpuStream())
        return self.streams[-1]

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.readers.append((self.streams.index(stream), tensor.data_ptr(), tensor.nbytes))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    platform = Recorded()
    monkeypatch.setattr(platforms, "_current", platform)
    return platform


@pytest.mark.parametrize("of_any_stream", [False, True])
def test_the_copy_to_the_host_keeps_memory_of_other_streams(recorded, of_any_stream):
    x = torch.randn(8, 8).requires_grad_()
    layer_pass = LayerPass("layer 1", 0, iter(()), of_any_stream=of_any_stream)
    with layer_pass.hooks():
        between = 2 * x
        y = between[2:].sin()
    layer_pass.leave()
    to_host = 0
    # The view's whole storage is copied: 8 x 8 fp32 numbers.
    assert recorded.readers == [(to_host, between.data_ptr(), 256)] * of_any_stream
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient[2:].equal(2 * (2 * x[2:]).cos())


class NoMegatron(Megatron):
    """Fake Megatron without Transformer Engine."""

    def __call__(self, name: str) -> Any:
        return SimpleNamespace()


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_context_parallel_layers_allocate_on_any_stream(recorded, context_parallel):
    class Layer(torch.nn.Module):
        layer_number = 1
        config = SimpleNamespace(context_parallel_size=context_parallel)

        def __init__(self) -> None:
            super().__init__()
            self.self_attention = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax(-1))

        def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
            return (self.self_attention(hidden_states),)

    having = Context("swap-attention", Options(True, None, "self_attention", 0), NoMegatron(), log.get())
    layer = Layer()
    swap_layers._choose_with(having)(layer)
    output = swap_layers.swap_in_layer(Layer.forward, having)(layer, torch.randn(8, 8).requires_grad_())
    assert len(recorded.readers) == (context_parallel > 1) * 2, "what both modules save"
    del output


def test_another_stream_that_reads_what_has_come_back_keeps_it(recorded):
    tensor = torch.arange(64.0)
    swapped = SwappedStorage(tensor.untyped_storage(), tensor.dtype)
    swapped.leave()
    del tensor
    swapped.come_back()
    back = swapped.on_device()
    assert recorded.readers == [], "the stream that it was allocated for"
    # A stream that the storage was not allocated for.
    with recorded.use_stream(recorded.new_stream()):
        assert swapped.on_device().data_ptr() == back.data_ptr()
    assert recorded.readers == [(len(recorded.streams) - 1, back.data_ptr(), 256)]
    assert torch.empty(0).set_(back).equal(torch.arange(64.0))
    del swapped
    assert in_use() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool], ids=str)
def test_a_storage_comes_back_with_numbers_of_the_type_that_left(recorded, dtype):
    # torch_npu keeps the description of a storage's first tensor, and some operators read it.
    made = []

    class Births(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket is torch.ops.aten.empty and result.numel():
                made.append((tuple(result.shape), result.dtype))
            return result

    tensor = torch.arange(48).reshape(6, 8).to(dtype)
    expected = tensor.clone()
    swapped = SwappedStorage(tensor.untyped_storage(), dtype)
    swapped.leave()
    del tensor
    with Births():
        back = swapped.on_device()
    assert made == [((48,), dtype)]
    assert torch.empty(0, dtype=dtype).set_(back, 0, (6, 8)).equal(expected)


def test_a_layers_tensors_keep_their_type(recorded, monkeypatch):
    seen = []
    original = SwappedStorage.__init__
    monkeypatch.setattr(
        SwappedStorage, "__init__", lambda self, *given: seen.append(given[1]) or original(self, *given)
    )
    x = torch.randn(8, 8, dtype=torch.bfloat16).requires_grad_()
    layer_pass = LayerPass("layer 1", 0, iter(()))
    with layer_pass.hooks():
        y = (2 * x).sin()
    layer_pass.leave()
    assert seen == [torch.bfloat16]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.equal(2 * (2 * x.detach()).cos())
