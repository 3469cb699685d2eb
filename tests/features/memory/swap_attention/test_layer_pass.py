"""Single saved tensors between forward and backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.features.memory.swap_attention.layer_pass import LayerPass, _of_others
from mindspeed_dsa.parallel import saved_tensors
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms import host_pool
from mindspeed_dsa.platforms.cpu import CpuEvent, CpuPlatform, CpuStream
from tests.features.memory.recompute_cases import allocations
from tests.features.memory.swap_attention.counted_copies import Copies, copies, in_use

SIZE = 64
NBYTES = SIZE * SIZE * 4


@pytest.fixture
def seen() -> Iterator[Copies]:
    with copies() as found:
        yield found
    assert in_use() == 0, "every buffer has been given back"


def source() -> Tensor:
    """Return a ``[SIZE, SIZE]`` leaf that requires a gradient."""
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).requires_grad_()


def swapped(function: Callable[..., Tensor], *inputs: Tensor, min_bytes: int = 0, stays: Any = ()) -> Tensor:
    """Run ``function(*inputs)`` in a separate layer pass."""
    layer_pass = LayerPass("layer 7", min_bytes, iter(stays))
    with layer_pass.hooks():
        output = function(*inputs)
    layer_pass.leave()
    return output


def gradient(output: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(output.sum(), x)
    return found


def chain(x: Tensor) -> Tensor:
    """Function that saves two tensors: the sine's input and the exponential's output."""
    return (2 * x).sin().exp()


def test_the_device_forgets_what_the_host_has(seen):
    x = source()
    held: list[int] = [0]
    with allocations(held):
        y = swapped(chain, x)
    assert NBYTES <= held[-1] < NBYTES + 64, "the output, and no tensor that was saved"
    assert seen.out == [NBYTES, NBYTES]
    del y
    expected, x = gradient(chain(x), x), source()
    y = swapped(chain, x)
    with allocations(held):
        actual = gradient(y, x)
    assert seen.back == [NBYTES], "the exponential's output is alive"
    assert actual.equal(expected)


def test_views_share_one_copy(seen):
    def function(x: Tensor) -> Tensor:
        query, key, value = (2 * x).T.split([16, 16, 32])  # transposed
        mixed = (query * key).T @ value[::2]  # strided
        return mixed.sum() + (value[:20] * value[12:]).sum()  # overlapping

    x = source()
    expected = gradient(function(x), x)
    y = swapped(function, x)
    assert seen.out == [NBYTES, 16 * SIZE * 4], "the mixed tensor, and the product of query and key"
    assert gradient(y, x).equal(expected)
    assert sorted(seen.back) == sorted(seen.out)


def test_two_passes_that_save_one_tensor_have_a_copy_each(seen):
    x = source()
    shared = 2 * x
    first, second = (swapped(lambda t: t * t, shared) for _ in range(2))
    del shared
    assert seen.out == [NBYTES, NBYTES]
    assert gradient(first + second, x).equal(2 * gradient((2 * x) * (2 * x), x))
    assert seen.back == [NBYTES, NBYTES]


def test_what_is_alive_is_not_copied_back(seen):
    x = source()
    kept = 2 * x
    y = swapped(torch.sin, kept)
    address = kept.data_ptr()
    got = []
    y.grad_fn.register_prehook(lambda _: got.append(y.grad_fn._saved_self.data_ptr()))
    expected = gradient(torch.sin(2 * x), x)
    assert gradient(y, x).equal(expected)
    assert got == [address]
    assert seen.out == [NBYTES]
    assert seen.back == []


def test_small_storages_stay(seen):
    x = source()
    y = swapped(chain, x, min_bytes=NBYTES + 1)
    assert gradient(y, x).equal(gradient(chain(x), x))
    assert seen.out == []
    swapped(chain, x, min_bytes=NBYTES)
    assert seen.out == [NBYTES, NBYTES]


def test_parameters_leaves_and_what_others_need_stay(seen):
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
    x, mask = source(), torch.rand(SIZE, SIZE)
    y = swapped(lambda t: (t @ weight.t()) * mask, x, stays=[weight, mask])
    assert seen.out == []
    found = torch.autograd.grad(y.sum(), [x, weight])
    expected = torch.autograd.grad(((x @ weight.t()) * mask).sum(), [x, weight])
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


@dataclass
class Packed:
    """Arguments like Megatron's description of packed sequences."""

    offsets: Tensor
    longest: int = 5


def test_what_all_layers_are_given_belongs_to_others():
    module = torch.nn.BatchNorm1d(3)
    mask, cosine, sine, bias, offsets = torch.ones(5, 2).unbind()
    arguments = [mask, (cosine, [sine]), {"bias": bias}, Packed(offsets), None, 7]
    found = list(_of_others([module], arguments))
    expected = [*module.parameters(), *module.buffers(), mask, cosine, sine, bias, offsets]
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def test_parameters_are_found_again():
    weight, other = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    got = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (saved,) = ctx.saved_tensors
            got.append((saved, saved_tensors.parameter_of(saved)))
            return grad.expand(4, 4)

    swapped(Keeps.apply, weight).backward()
    # Autograd returns a new tensor object for a saved parameter, which has to be mapped back.
    ((saved, own),) = got
    assert own is weight
    assert saved is not weight, "autograd hands out a look-alike"
    assert saved_tensors.parameter_of(other) is other, "nobody has taken it"
    weight.data = torch.randn(4, 4)
    assert saved_tensors.parameter_of(saved) is saved, "the parameter lies elsewhere now"


def test_a_dropped_graph_gives_everything_back(seen):
    # Reference counting has to be enough.
    gc.disable()
    try:
        y = swapped(chain, source())
        assert in_use() > 0
        del y
        assert in_use() == 0
        y = swapped(torch.exp, source(), min_bytes=NBYTES + 1)  # saves its output
        storage = weakref.ref(y.untyped_storage())
        del y
        assert storage() is None
    finally:
        gc.enable()


def test_twice_through_one_graph(seen):
    x = source()
    y = swapped(chain, x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert first.equal(second)
    assert len(seen.back) == 1, "one copy serves both, and one storage is alive"
    del y


def test_second_derivatives(seen):
    def second(output: Tensor, x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return gradient(first, x)

    x = source()
    assert second(swapped(chain, x), x).equal(second(chain(x), x))


@pytest.mark.parametrize("which", ["the same", "a view", "another counter"])
def test_what_has_changed_since_its_first_save_is_copied_again(seen, which):
    # The first graph is dropped, so no autograd check reports the change.
    weight = source()

    def function(weight: Tensor) -> Tensor:
        x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1))
        again = {"the same": x, "a view": x.view(-1, 8), "another counter": x.data}[which]
        # Saves x before its change; the product is dropped.
        weight * x
        x.add_(1)
        return weight.view(again.shape) * again

    expected = gradient(function(weight), weight)
    y = swapped(function, weight)
    assert seen.out == [NBYTES, NBYTES]
    assert gradient(y, weight).equal(expected)


@pytest.mark.parametrize("min_bytes", [0, 1 << 20], ids=("on the host", "on the device"))
def test_a_change_in_place_is_reported(seen, min_bytes):
    x = source()
    middle = 2 * x
    y = swapped(lambda t: t.sin(), middle, min_bytes=min_bytes)
    gradient(swapped(lambda t: t.sin(), middle.add_(1), min_bytes=min_bytes), x)  # changed before it is saved
    with pytest.raises(RuntimeError, match=r"layer 7: a tensor of shape \[64, 64\].*version 1, saved at 0"):
        gradient(y, x)


def test_a_change_of_a_view_in_place_is_reported(seen):
    x = source()
    middle = 2 * x
    y = swapped(lambda t: t[:8].sin(), middle)
    middle[60:].mul_(2)
    with pytest.raises(RuntimeError, match="has been changed in place"):
        gradient(y, x)


def test_storages_that_are_recomputed_in_place_stay(seen):
    x = source()
    middle = 2 * x
    # Another feature recomputes into this storage, so it must stay in place.
    saved_tensors.mark_freed(middle)
    y = swapped(lambda t: t[1:].sin(), middle)
    assert seen.out == []
    values, storage = middle.detach().clone(), middle.untyped_storage()
    storage.resize_(0)
    storage.resize_(NBYTES)
    storage.copy_(values.untyped_storage())
    assert gradient(y, x).equal(gradient((2 * x)[1:].sin(), x))


def test_an_exception_leaves_no_hooks_and_no_buffers(seen):
    def fails(x: Tensor) -> Tensor:
        chain(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        swapped(fails, source())
    x = source()
    before = len(seen.out)
    (2 * x).sin()
    assert len(seen.out) == before == 2


def test_too_little_host_memory_is_reported_with_what_to_do(monkeypatch):
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: 0)
    host_pool.shared.release_kept()
    with pytest.raises(SettingsError, match=r"GiB of pinned host memory.*0\.00 GiB free; swap fewer layers"):
        swapped(chain, source())
    assert in_use() == 0


class LateEvent(CpuEvent):
    """Event of a copy that runs only when something waits for it."""

    copy: Callable[[], None] | None = None

    def wait(self, stream: Any = None) -> None:
        if self.copy is not None:
            copy, self.copy = self.copy, None
            copy()

    def query(self) -> bool:
        return self.copy is None


class LatePlatform(CpuPlatform):
    """Platform with side streams that run as late as possible, and that fail if memory is gone by then."""

    asynchronous = True

    def __init__(self) -> None:
        self.streams: list[CpuStream] = []
        self.used: list[int] = []
        self.lost = 0

    def new_stream(self) -> CpuStream:
        self.streams.append(CpuStream())
        return self.streams[-1]

    def copy_async(self, destination: Tensor, source: Tensor) -> LateEvent:
        self.used.append(self.streams.index(self.current_stream()))
        # Weak references, so that the copy itself does not keep the memory alive.
        ends = [weakref.ref(tensor.untyped_storage()) for tensor in (destination, source)]
        nbytes = destination.nbytes

        def copy() -> None:
            storages = [end() for end in ends]
            if None in storages:
                self.lost += 1
                return
            to, origin = (torch.empty(0, dtype=torch.uint8).set_(storage)[:nbytes] for storage in storages)
            to.copy_(origin)

        event = LateEvent()
        event.copy = copy
        return event


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LatePlatform:
    platform = LatePlatform()
    monkeypatch.setattr(platforms, "_current", platform)
    return platform


def test_copies_are_waited_for(late):
    x = source()
    y = swapped(lambda t: (2 * t).sin(), x)
    assert gradient(y, x).equal(2 * (2 * x).cos())
    assert late.used == [0, 1], "a stream for each direction"
    assert late.lost == 0


def test_memory_is_not_given_back_under_a_copy(late):
    # A prefetched tensor is dropped. The copy has to end before its memory is used again.
    x = source()
    below = LayerPass("layer 0", 0, iter(()))
    above = LayerPass("layer 1", 0, iter(()), below)
    with below.hooks():
        y = (2 * x).sin()
    below.leave()
    above.backward_begins(y)
    assert late.used == [0, 1]
    del y
    assert late.lost == 0
    assert in_use() == 0


def test_a_buffer_is_not_used_again_under_a_copy(late):
    # The graph is dropped before the copy to the host has run.
    layer_pass = LayerPass("layer 1", 0, iter(()))
    x = source()
    with layer_pass.hooks():
        y = (2 * x).sin()
        del y
    (swapped_storage,) = layer_pass._leaving
    event = swapped_storage._last_copy
    layer_pass._leaving.clear()
    layer_pass._saved.clear()
    del swapped_storage
    # The copy has not run yet.
    assert in_use() > 0
    event.wait()
    assert in_use() == 0


def test_the_layer_below_is_fetched_ahead(seen):
    x = source()
    passes: list[LayerPass] = []
    for number in range(3):
        passes.append(LayerPass(f"layer {number}", 0, iter(()), passes[-1] if passes else None))
        with passes[-1].hooks():
            x = (2 * x).sin()
        passes[-1].leave()
    counts = []
    for layer_pass in reversed(passes):
        layer_pass.backward_begins(x)
        counts.append(len(seen.back))
    assert counts == [2, 3, 3]
    del x, layer_pass, passes
