"""CPU operators allocate bounded memory, and read no memory that they have not written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_dsa.ops.cpu import blocks
from mindspeed_dsa.ops.cpu import threads as cpu_threads
from mindspeed_dsa.ops.indexer_kl_loss import cpu as loss_cpu
from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.by_head import sparse_attention_by_head
from tests.ops.random_inputs import indexer_inputs, random_indices

TOPK = 16
DTYPE = torch.float32


class LargestStorage(TorchDispatchMode):
    """Records the bytes of the largest storage that any operation of this thread returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.names.add(function.overloadpacket.__name__)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


@pytest.fixture
def one_thread():
    """Run operators in the calling thread, where dispatch modes see their operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def main_inputs(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(1, length, 2, 12, generator=generator).requires_grad_(),
        torch.randn(1, length, 12, generator=generator).requires_grad_(),
    )


def causal_indices(length: int) -> torch.Tensor:
    # The last TOPK keys up to the query token, -1 before the first key.
    position = torch.arange(length)[:, None] - torch.arange(TOPK)
    return position.clamp_min(-1).int()[None]


def run_indexer(length: int, backend: str) -> None:
    inputs = [x.requires_grad_() for x in indexer_inputs(1, length, heads=2, dim=8)]
    scores = lightning_indexer(*inputs, TOPK, backend=backend).topk_scores
    scores.masked_fill(scores == -torch.inf, 0).sum().backward()


def run_selected_scores(length: int, backend: str) -> None:
    inputs = [x.requires_grad_() for x in indexer_inputs(1, length, heads=2, dim=8)]
    scores = selected_scores(*inputs, causal_indices(length), backend=backend)
    scores.masked_fill(scores == -torch.inf, 0).sum().backward()


def run_attention(length: int, backend: str) -> None:
    query, key_value = main_inputs(length)
    result = sparse_flash_attention(
        query,
        key_value,
        causal_indices(length),
        0.3,
        value_dim=8,
        return_attention_sum=True,
        backend=backend,
    )
    result.out.sum().backward()


def run_heads(length: int, backend: str) -> None:
    query, key_value = main_inputs(length)
    # One head's keys and values for both heads.
    keys = [key_value[:, :, None, :size].expand(-1, -1, 2, -1) for size in (12, 8)]
    indices = causal_indices(length)
    out, _ = sparse_attention_by_head(query, *keys, indices, 0.3, return_attention_sum=True, backend=backend)
    out.sum().backward()


def run_loss(length: int, backend: str) -> None:
    inputs = [x.requires_grad_() for x in indexer_inputs(1, length, heads=2, dim=8)]
    indexer_kl_loss(*inputs, *main_inputs(length), causal_indices(length), 0.3, backend=backend).backward()


def run_dense_loss(length: int, backend: str) -> None:
    inputs = [x.requires_grad_() for x in indexer_inputs(1, length, heads=2, dim=8)]
    dense_indexer_kl_loss(*inputs, *main_inputs(length), 0.3, backend=backend).backward()


RUNS = [run_indexer, run_selected_scores, run_attention, run_heads, run_loss]
LONG = pytest.param(run_dense_loss, marks=pytest.mark.full)


def largest_of(run: Callable[[int, str], None], length: int, backend: str) -> int:
    with LargestStorage() as seen:
        run(length, backend)
    # Otherwise operations in other threads would escape the mode.
    assert seen.names & {"bmm", "baddbmm", "addmm", "mm", "einsum"}, "the mode must see the products"
    return seen.bytes


@pytest.mark.parametrize("run", [*RUNS, LONG])
def test_no_allocation_has_two_sequence_axes(run, one_thread, monkeypatch):
    # Minimal blocks, so that they do not hide growth.
    monkeypatch.setattr(loss_cpu, "_DENSE_BLOCK", 4096)
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 4096)
    # Four times the length may take at most four times the largest allocation.
    small, large = (largest_of(run, length, "cpu") for length in (512, 2048))
    assert large <= 4.1 * small
    assert large < 2048 * 2048, "as much as a mask of bytes"


@pytest.mark.parametrize("run", [run_indexer, run_selected_scores, run_dense_loss])
def test_the_measurement_sees_two_sequence_axes(run, one_thread):
    small, large = (largest_of(run, length, "reference") for length in (256, 512))
    # The reference holds length x length fp32 scores.
    assert large == 4 * small >= 256 * 256 * 4


@pytest.mark.parametrize("run", [run_attention, run_loss])
def test_scratch_does_not_grow_with_the_sequence(run, one_thread):
    """Scratch blocks stay smaller than the gathered keys of all rows would be."""
    # tokens x topk x 12 columns x 4 bytes
    assert largest_of(run, 2048, "cpu") < 2048 * TOPK * 12 * 4


def results(run: str) -> list[torch.Tensor]:
    index = [x.requires_grad_() for x in indexer_inputs(2, 45, heads=3, dim=8, dtype=DTYPE)]
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, 45, 4, 12, generator=generator).to(DTYPE).requires_grad_()
    key = torch.randn(2, 45, 12, generator=generator).to(DTYPE).requires_grad_()
    indices = random_indices(2, 45, 45, 20, empty_rows=(0, 3, 44))
    if run == "indexer":
        outputs = lightning_indexer(*index, 20, backend="cpu")
        scores = outputs.topk_scores.masked_fill(outputs.topk_indices < 0, 0)
        return [*outputs, *torch.autograd.grad(scores.sin().sum(), index)]
    if run == "selected":
        scores = selected_scores(*index, indices, backend="cpu")
        grads = torch.autograd.grad(scores.masked_fill(indices < 0, 0).sin().sum(), index)
        return [scores, *grads]
    if run == "attention":
        outputs = sparse_flash_attention(
            query,
            key,
            indices,
            0.3,
            value_dim=8,
            return_attention_sum=True,
            topk_scores=torch.zeros(indices.shape).requires_grad_(),
            score_gradient=lambda total: total,
            backend="cpu",
        )
        return [*outputs, *torch.autograd.grad(outputs.out.sin().sum(), [query, key])]
    if run == "heads":
        keys = [key[:, :, None, :size].expand(-1, -1, 4, -1) for size in (12, 8)]
        out, summed = sparse_attention_by_head(query, *keys, indices, 0.3, return_attention_sum=True)
        return [out, summed, *torch.autograd.grad(out.sin().sum(), [query, key])]
    form = indexer_kl_loss if run == "loss" else dense_indexer_kl_loss
    extra = (indices,) if run == "loss" else ()
    loss = form(*index, query, key, *extra, 0.3, backend="cpu")
    return [loss, *torch.autograd.grad(loss, index)]


@pytest.mark.parametrize("run", ["indexer", "selected", "attention", "heads", "loss", "dense"])
@pytest.mark.parametrize("threads", [1, 3])
def test_stale_scratch_is_never_read(run, threads, monkeypatch):
    """NaN in fresh memory, and in scratch reused from an earlier block, changes nothing."""
    assert torch.empty(1000).isnan().all(), "the fixture poisons fresh memory"
    # Tiles of one row, so that scratch is reused often.
    monkeypatch.setattr(blocks, "_TILE_BYTES", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    poisoned = []
    original = blocks.Scratch.__call__

    def poison(self, name, *shape):
        poisoned.append(name)
        return original(self, name, *shape).fill_(torch.nan)

    try:
        expected = results(run)
        monkeypatch.setattr(blocks.Scratch, "__call__", poison)
        results_with_nan = results(run)
    finally:
        torch.set_num_threads(before)
    assert poisoned or run == "dense", "the dense form has no scratch"
    for one, other in zip(results_with_nan, expected, strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shares_are_fixed_and_complete(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shares = cpu_threads.share_out(range(13), list)
        assert sorted(itertools.chain(*shares)) == list(range(13))
        assert len(shares) == threads
        assert shares == cpu_threads.share_out(range(13), list)
        assert cpu_threads.share_out([], list) == [[]]
        assert torch.get_num_threads() == threads, "the caller's number of threads stays"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_see_the_callers_mode_and_pass_errors_on(threads):
    def state(share):
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()

    def fail(share):
        raise RuntimeError(f"no luck with {list(share)}")

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Work runs without autograd and with one torch thread; inference mode is inherited.
        assert set(cpu_threads.share_out(range(6), state)) == {(False, False, 1)}
        with torch.inference_mode():
            assert set(cpu_threads.share_out(range(6), state)) == {(False, True, 1)}
            lightning_indexer(*indexer_inputs(1, 40), 8, backend="cpu")
        with pytest.raises(RuntimeError, match="no luck with"):
            cpu_threads.share_out(range(6), fail)
    finally:
        torch.set_num_threads(before)
