"""Costs of one layer's sparse attention on a device other than its operators: no wait of the host."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.packs import Pack, PackRows
from mindspeed_dsa.features.dsa import problem as problems
from mindspeed_dsa.features.dsa import sparse_attention
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import IndexInputs, LossOptions, Problem, Rows
from mindspeed_dsa.ops.npu import layout
from tests.npu.counting import Counts, counted
from tests.npu.test_indexer_kl_loss import SCALE
from tests.ops.random_inputs import indexer_inputs

LENGTH, TOPK, HEADS, VALUE_DIM = 40, 2048, 64, 16
# Rows of context parallel rank 0 of 2, in two runs.
RUNS = [(0, 10, 0, 10), (10, 20, 0, LENGTH)]


def leaves(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Return main query and key, the value's up-projection, and the indexer's three inputs."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((rows, 1, HEADS, 576), (LENGTH, 1, 1, 576), (HEADS, VALUE_DIM, 512))
    main = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    index = indexer_inputs(1, rows, LENGTH, heads=8, dim=128, dtype=torch.bfloat16)
    return [x.detach().to(dtype).requires_grad_() for x in (*main, *index)]


def layer(
    form: str, backend: str, given: list[Tensor], loss: LossOptions | None, ropes: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Return output, loss and gradients; gradients of the query's and key's rotary parts come last."""
    query, key, up_value, *index = given
    rotary = dict(zip(("query_rope", "key_rope"), ropes, strict=False))
    operands, inputs = Operands(query, key, up_value, SCALE, **rotary), IndexInputs(*index)
    if form == "runs":
        problem = Problem(operands, TOPK, loss=loss, backend=backend)
        result = sparse_attention.attend_by_runs(problem, inputs, RUNS, LENGTH)
    else:
        rows = Rows()
        if form == "packed":
            pack = PackRows(Pack.of_prefix_sums([0, 25, 26, LENGTH], None, LENGTH))
            rows = Rows.of_pack(pack, query.device)
        problem = Problem(operands, TOPK, rows, loss=loss, backend=backend)
        result = sparse_attention.sparse_attention(problem, inputs)
    assert result.loss is not None
    total = result.out.float().square().sum() + 100 * result.loss
    return [result.out, result.loss, *torch.autograd.grad(total, [*given, *ropes])]


@pytest.fixture
def counts_of(npu_kernels, monkeypatch):
    # Take the branch for more keys than a row selects; real sizes would take the CPU kernels minutes.
    monkeypatch.setattr(problems, "every_key_is_chosen", lambda *_: False)

    def run(form: str) -> Counts:
        layout.layout_of_form.cache_clear()
        given = leaves(20 if form == "runs" else LENGTH, torch.bfloat16)
        with counted() as counts:
            layer(form, "npu", given, LossOptions(0.5, on_chosen_keys=True))
        return counts

    return run


@pytest.mark.parametrize("form", ["causal", "packed", "runs"])
def test_the_host_waits_for_nothing_and_the_ai_cpu_has_nothing_to_do(npu_kernels, counts_of, form):
    counts = counts_of(form)
    # Selection, attention, loss and the attention's gradient of each run.
    assert len(npu_kernels) == (8 if form == "runs" else 4)
    assert not counts.host_reads, counts.told("host_reads")
    assert not counts.ai_cpu, counts.told("ai_cpu")
    assert not counts.doubles, counts.told("doubles")


def test_a_query_in_two_parts_is_not_copied(npu_kernels, counts_of):
    """Nor joined for the loss. A query in one piece is split three times, and its gradient is joined."""
    given = leaves(LENGTH, torch.bfloat16)
    wanted = LossOptions(0.5, on_chosen_keys=True)
    with counted() as counts:
        whole = layer("causal", "npu", given, wanted)
    copies = [event for event in counts.copies if event.shape[-2:] in ((HEADS, 64), (HEADS, 576))]
    assert len(copies) == 4, counts.told("copies")
    latent, rope = (x.detach().contiguous().requires_grad_() for x in given[0].split([512, 64], dim=-1))
    with counted() as counts:
        apart = layer("causal", "npu", [latent, *given[1:]], wanted, [rope])
    copies = [event for event in counts.copies if event.shape[-2:] in ((HEADS, 64), (HEADS, 576))]
    assert not copies, counts.told("copies")
    of_query, *others = whole[2:]
    assert torch.equal(torch.cat([apart[2], apart[-1]], dim=-1), of_query)
    for one, other in zip((*apart[:2], *apart[3:-1]), (*whole[:2], *others), strict=True):
        assert torch.equal(one, other)


def test_neither_part_of_a_query_or_a_key_is_copied_run_by_run(npu_kernels, counts_of):
    """Only each part's gradient is joined from both runs; keys of the runs overlap."""
    given = leaves(20, torch.bfloat16)
    wanted = LossOptions(0.5, on_chosen_keys=True)
    whole = layer("runs", "npu", given, wanted)
    query, key = (
        [x.detach().contiguous().requires_grad_() for x in one.split([512, 64], dim=-1)] for one in given[:2]
    )
    with counted(smallest_copy=key[1].numel() // 2) as counts:
        apart = layer("runs", "npu", [query[0], key[0], *given[2:]], wanted, [query[1], key[1]])
    # Rows of a query, and keys of a run, in the operators' layout or in the original one.
    shapes = {(*heads, width) for heads in ((HEADS,), (1,)) for width in (64, 512, 576)}
    copies = [event.shape for event in counts.copies if event.shape[-2:] in shapes]
    grad_out = [(1, 10, HEADS, 512)] * 2
    assert sorted(copies) == sorted([*grad_out, (20, 1, HEADS, 64), (20, 1, HEADS, 512)]), counts.told(
        "copies"
    )
    for one, parts in zip(whole[2:4], ((apart[2], apart[-2]), (apart[3], apart[-1])), strict=True):
        assert torch.equal(torch.cat(parts, dim=-1), one)
    for one, other in zip((*apart[:2], *apart[4:-2]), (*whole[:2], *whole[4:]), strict=True):
        assert torch.equal(one, other)
