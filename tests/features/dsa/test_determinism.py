"""Claims of docs/design/determinism.md that no other test covers; each claim names its tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.layout import Layout, Zigzag
from mindspeed_dsa.context_parallel.packs import DocumentZigzag
from mindspeed_dsa.ops.lightning_indexer import cpu as indexer_cpu
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.quantised_indexer import quantised_indexer
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention
from tests.ops.random_inputs import BACKENDS, indexer_inputs, tied_inputs
from tests.support import model as job

ROOT = Path(__file__).parents[3]
TOPK = 6
FUSED = {"use_fused_dsa": True}
FP8 = {**FUSED, "dsa_indexer_precision": "fp8"}
ALL_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def selected(inputs: Any, topk: int, precision: str = "full", backend: str = "cpu", **rows: Any) -> Tensor:
    if precision == "full":
        return lightning_indexer(*inputs, topk, backend=backend, **rows).topk_indices
    return quantised_indexer(*inputs, topk, powers_of_two=precision == "fp8", backend=backend, **rows)


# -- operators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3])
def test_threads_change_selection_scores_and_output_in_nothing(number):
    inputs = indexer_inputs(1, 500, heads=16, dim=64)
    noise = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, 500, *shape, generator=noise).requires_grad_() for shape in ((4, 40), (40,)))

    def run(count: int) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        with threads(count):
            indices, scores = lightning_indexer(*leaves, 48, backend="cpu")
            of_query, _, of_weights = torch.autograd.grad(scores[indices >= 0].sum(), leaves)
            out = sparse_flash_attention(query, key, indices, 0.2, value_dim=32, backend="cpu").out
            (gradient,) = torch.autograd.grad(out.sin().sum(), [query])
        return [indices, scores.detach(), of_query, of_weights, out.detach(), gradient]

    for found, expected in zip(run(number), run(1), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("elements", [1 << 8, 1 << 12])
def test_sizes_of_slabs_decide_nothing_where_scores_are_exact(elements, monkeypatch):
    inputs = tied_inputs(rows=300)
    expected = selected(inputs, 40, backend="reference")
    assert torch.equal(selected(inputs, 40), expected)
    monkeypatch.setattr(indexer_cpu, "_PRODUCT_ELEMENTS", elements)
    assert torch.equal(selected(inputs, 40), expected)


def test_sizes_of_slabs_move_keys_of_nearly_equal_scores_alone(monkeypatch):
    inputs = indexer_inputs(1, 300, heads=16, dim=64)
    expected = lightning_indexer(*inputs, 40, backend="cpu")
    last = expected.topk_scores.amin(-1, keepdim=True)
    monkeypatch.setattr(indexer_cpu, "_PRODUCT_ELEMENTS", 1 << 12)
    found = lightning_indexer(*inputs, 40, backend="cpu")
    moved = (found.topk_indices != expected.topk_indices) & (found.topk_indices >= 0)
    assert not ((found.topk_scores - last).abs() > 1e-5)[moved].any()


DEALT: dict[str, Layout] = {
    "zigzag": Zigzag(3),
    "blocks": Zigzag(3, 4),
    "documents": DocumentZigzag(2, ((0, 24), (24, 96))),
}


@pytest.mark.parametrize("layout", DEALT.values(), ids=DEALT)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_dealt_in_any_way_select_the_same_in_fp8(backend, layout):
    inputs = indexer_inputs(1, 96, heads=8, dim=32)
    whole = selected(inputs, 9, "fp8", backend)
    for rank in range(layout.ranks):
        rows = layout.rows_of_rank(rank, 96)
        of_rank = (inputs.query[:, rows], inputs.key, inputs.weights[:, rows])
        assert torch.equal(selected(of_rank, 9, "fp8", backend, ends=rows + 1), whole[:, rows])


@pytest.mark.parametrize("precision", ["full", "fp8"])
def test_deterministic_algorithms_select_the_same(precision):
    inputs = tied_inputs(rows=80)
    before = torch.are_deterministic_algorithms_enabled()
    selections = []
    for on in (False, True):
        torch.use_deterministic_algorithms(on)
        try:
            selections.append(selected(inputs, 7, precision))
        finally:
            torch.use_deterministic_algorithms(before)
    assert torch.equal(*selections)


# -- torch.topk --------------------------------------------------------------------------------


def plateau(rows: int = 32, keys: int = 512) -> Tensor:
    """Return scores of which 2 % are positive and all others exactly 0."""
    noise = torch.Generator().manual_seed(0)
    scores = torch.rand(rows, keys, generator=noise)
    return torch.where(torch.rand(rows, keys, generator=noise) < 0.02, scores, 0.0)


def as_inputs(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return indexer inputs with these scores, one sequence per row."""
    rows = len(scores)
    return scores.new_ones(rows, 1, 1, 1), scores[:, :, None], scores.new_ones(rows, 1, 1)


def ours(scores: Tensor, keys: int | None = None) -> Tensor:
    ends = torch.tensor([keys or scores.shape[1]])
    found = lightning_indexer(*as_inputs(scores), 64, ends=ends, use_relu=False, backend="cpu")
    return found.topk_indices[:, 0].long()


def torchs(scores: Tensor) -> Tensor:
    return scores.topk(64, sorted=False).indices.sort(-1).values


def test_torch_topk_takes_other_keys_of_a_plateau():
    scores = plateau()
    stable = scores.sort(dim=-1, descending=True, stable=True).indices[:, :64].sort(-1).values
    assert torch.equal(ours(scores), stable)
    by_torch = torchs(scores)
    assert (by_torch != stable).any(-1).all()
    # Equal scores at other positions: both selections are right.
    assert torch.equal(*(scores.gather(1, at).sort(-1).values for at in (by_torch, stable)))


def test_torch_topk_lets_hidden_keys_decide():
    scores = plateau()
    longer = torch.nn.functional.pad(scores, (0, 512), value=-torch.inf)
    assert (torchs(longer) != torchs(scores)).any(-1).float().mean() > 0.25
    # Keys that a row does not see have the highest scores, and change nothing.
    longer = torch.nn.functional.pad(scores, (0, 512), value=9.0)
    assert torch.equal(ours(longer, 512), ours(scores))


def test_torch_topk_repeats_itself_and_deterministic_algorithms_change_nothing():
    scores = plateau()
    expected = torchs(scores)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(torchs(scores), expected)
    assert torch.equal(torchs(scores.T.contiguous().T), expected)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(torchs(scores), expected)
    finally:
        torch.use_deterministic_algorithms(before)


def test_torch_topk_takes_nan_first():
    scores = plateau()
    scores[:, 5] = torch.nan
    assert (torchs(scores) == 5).any(-1).all()
    assert not (ours(scores) == 5).any()


# -- a step of training ------------------------------------------------------------------------


def step(switches: dict[str, Any], overrides: dict[str, Any], **layout: Any) -> dict[str, Any]:
    """Run a training step in a worker; also return every layer's selected keys, in order."""
    from mindspeed_dsa.features.dsa import sparse_attention

    indices: list[Tensor] = []

    def noting(name: str) -> Any:
        original = getattr(sparse_attention, name)

        def select(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            indices.append((result if isinstance(result, Tensor) else result.topk_indices).clone())
            return result

        return mock.patch.object(sparse_attention, name, select)

    with noting("lightning_indexer"), noting("quantised_indexer"):
        result = job.run(switches, overrides, micro_batch_size=2, **layout)
    return {**result, "selected": [each.sort(-1).values for each in indices]}


def run(pool: Any, ranks: int, switches: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    arguments = {"overrides": {}, **more}
    return pool.baseline(f"{__name__}:step", ranks, switches=switches, **arguments)


@pytest.mark.parametrize("switches", [pytest.param(FUSED, marks=pytest.mark.full), FP8], ids=["full", "fp8"])
def test_tensor_parallel_ranks_select_the_same(pool, switches):
    first, second = run(pool, 2, switches, tp=2)
    assert len(first["selected"]) == 2  # layers
    for found, expected in zip(first["selected"], second["selected"], strict=True):
        assert found.shape == (2, job.SEQUENCE, TOPK)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(ALL_LAYERS, marks=pytest.mark.full), CORE],
    ids=["all layers", "core attention"],
)
@pytest.mark.parametrize("switches", [pytest.param(FUSED, marks=pytest.mark.full), FP8], ids=["full", "fp8"])
def test_a_recomputation_selects_the_same(pool, switches, overrides):
    (plain,) = run(pool, 1, switches)
    (again,) = run(pool, 1, switches, overrides=overrides)
    forward, recomputed = again["selected"][:2], again["selected"][2:]
    assert len(recomputed) == len(plain["selected"]) == 2
    # Backward recomputes the last layer first.
    for parts in (forward, recomputed[::-1]):
        assert all(map(torch.equal, parts, plain["selected"]))
    assert job.losses_of(again) == job.losses_of(plain)
    if overrides == CORE:
        # A recomputed core attention sums its gradients in another order.
        job.assert_same_gradients(again["gradients"], plain["gradients"], 1e-5)
    else:
        for name, gradient in plain["gradients"].items():
            assert torch.equal(again["gradients"][name], gradient), name


# -- the page ----------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "design" / "determinism.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows_of_page() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the claims in the page's tables, and the tests that each claim names."""
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not line.startswith(("| ---", "| Sentence")):
            sentence, *_, tests = (cell.strip() for cell in line.strip("|").split("|"))
            rows.append((sentence, NAMED.findall(tests)))
    return rows


def in_file(path: Path) -> dict[str, bool]:
    """Return the tests of a file, and whether each of them runs only in full runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: any("full" in ast.unparse(each) for each in node.decorator_list)
        and not any("parametrize" in ast.unparse(each) for each in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_sentence_of_the_page_names_tests_that_are_there():
    rows = rows_of_page()
    assert len(rows) > 20
    for sentence, tests in rows:
        assert tests, f"nothing holds: {sentence}"
        for path, name in tests:
            assert name in in_file(ROOT / path), f"{path} has no {name}, which holds: {sentence}"


def test_each_test_of_this_file_has_its_sentence():
    here = Path(__file__)
    named = {name for _, tests in rows_of_page() for path, name in tests if ROOT / path == here}
    mine = {name for name in in_file(here) if "page" not in name and "this_file" not in name}
    assert named == mine
