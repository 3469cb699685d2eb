"""Expert routings of every kind, and permutations of them computed with matrices in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.ops.moe_permute import permute, sort_chunks, unpermute
from tests.ops.oracle import relative_error

ROUTINGS = (
    # tokens, experts, kind
    (13, 4, "top 2"),
    (7, 512, "top 8"),
    (9, 1, "top 1"),
    (5, 3, "top 3"),
    (17, 6, "one expert"),
    (19, 5, "ragged"),
    (12, 4, "capacity 3"),
    (6, 4, "nowhere"),
    (0, 4, "top 0"),
)
NAMES = [f"{kind} of {experts}, {tokens} tokens" for tokens, experts, kind in ROUTINGS]
BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}


def routing_of(tokens: int, experts: int, kind: str) -> Tensor:
    """Return a bool routing map ``[tokens, experts]``."""
    noise = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens + experts))
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
    if kind.startswith("top"):
        routing_map.scatter_(1, noise.topk(int(kind[4:]), 1).indices, True)
    elif kind.startswith("capacity"):
        routing_map.scatter_(0, noise.topk(int(kind[9:]), 0).indices, True)
    elif kind == "one expert":
        routing_map[:, 2] = True
    elif kind == "ragged":  # a token without an expert, and an expert without a token
        routing_map = noise < 0.4
        routing_map[3], routing_map[:, 1] = False, False
    return routing_map


def uniform(chosen: Tensor) -> int | None:
    """Return the number of experts per token, or ``None`` if it varies."""
    counts = chosen.sum(1)
    return int(counts[0]) if len(counts) and bool((counts == counts[0]).all()) else None


def noise(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the permutation matrix ``[rows, tokens]`` in fp64, and the expert of each row."""
    pairs = [(t, e) for e in range(chosen.shape[1]) for t in range(len(chosen)) if chosen[t, e]]
    placed = torch.zeros(len(pairs), len(chosen), dtype=torch.float64)
    for row, (token, _) in enumerate(pairs):
        placed[row, token] = 1
    return placed, torch.tensor([expert for _, expert in pairs], dtype=torch.long)


def check(
    backend: str,
    routing: tuple[int, int, str],
    dtype: torch.dtype,
    probs_dtype: torch.dtype | None,
    *,
    hidden: int = 24,
    device: str = "cpu",
    weighted: bool = False,
    added: bool = False,
) -> None:
    """Compare permute, a stand-in for experts, and unpermute with the matrices: results and gradients.

    Args:
        backend: backend under test.
        routing: an entry of :data:`ROUTINGS`.
        dtype: dtype of the tokens.
        probs_dtype: dtype of the probabilities; ``None`` for no probabilities.
        hidden: width of a token.
        device: device of the operands.
        weighted: whether ``unpermute`` weights its sums by the probabilities, instead of ``permute``
            permuting them.
        added: whether the output of a shared expert is added.
    """
    routing_map = routing_of(*routing)
    count, experts = routing_map.shape
    placed, expert = matrix(routing_map)
    rows = len(placed)
    tokens = noise(count, hidden, dtype=dtype, seed=1)
    probs = None if probs_dtype is None else noise(count, experts, dtype=probs_dtype, seed=2)
    addend = noise(count, hidden, dtype=dtype, seed=3) if added else None
    upstream = noise(count, hidden, dtype=dtype, seed=4)

    def run(permuting: Any, leaves: list[Any]) -> list[Tensor]:
        tokens, probs, addend = leaves
        row_values, row_probs, total = permuting(tokens, probs, addend)
        loss = (total.double() * upstream.to(total.device).double()).sum()
        if row_probs is not None:
            loss = loss + row_probs.double().sin().sum()
        wanted = [leaf for leaf in leaves if leaf is not None]
        grads = torch.autograd.grad(loss, wanted)
        return [x.detach() for x in (row_values, row_probs, total, *grads) if x is not None]

    def ours(tokens: Tensor, probs: Tensor | None, addend: Tensor | None) -> tuple[Any, ...]:
        rows_known = {"rows": rows, "topk": uniform(routing_map)} if backend != "cpu" else {}
        moved = permute(
            tokens,
            routing_map.to(tokens.device),
            None if weighted else probs,
            backend=backend,
            **rows_known,
        )
        worked = moved.tokens * 2
        total = unpermute(
            worked, moved.row_map, count, probs if weighted else None, addend=addend, backend=backend
        )
        return moved.tokens, moved.probs, total

    def expected(tokens: Tensor, probs: Tensor | None, addend: Tensor | None) -> tuple[Any, ...]:
        moved = placed @ tokens
        row_probs = None if probs is None else (placed @ probs).gather(1, expert[:, None])[:, 0]
        weights = row_probs if weighted and row_probs is not None else torch.ones(rows).double()
        total = placed.t() @ (2 * moved * weights[:, None])
        return moved, None if weighted else row_probs, total if addend is None else total + addend

    leaves = [None if x is None else x.to(device).detach().requires_grad_() for x in (tokens, probs, addend)]
    wide = [None if x is None else x.double().detach().requires_grad_() for x in (tokens, probs, addend)]
    results, theirs = run(ours, leaves), run(expected, wide)
    again = run(ours, leaves)
    assert [x.dtype for x in results[:1]] == [dtype]
    for mine, same, other in zip(results, again, theirs, strict=True):
        assert mine.shape == other.shape
        assert torch.equal(mine, same), "two runs differ"
        if other.numel():
            kinds = {mine.dtype, dtype, *([probs_dtype] if weighted and probs_dtype else [])}
            assert relative_error(mine.cpu(), other) <= max(BOUNDS[kind] for kind in kinds)
    assert torch.equal(results[0].cpu().double(), theirs[0]), "permuted tokens are copies"


def check_chunks(backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Sort chunks, some of them empty, into another order and back again."""
    sizes, order = torch.tensor([3, 0, 5, 1, 0, 4]), torch.tensor([4, 2, 0, 5, 1, 3])
    rows = noise(13, 10, dtype=dtype, seed=5).to(device).requires_grad_()
    probs = noise(13, dtype=torch.float32, seed=6).to(device).requires_grad_()
    moved, moved_probs = sort_chunks(rows, sizes.to(device), order.to(device), probs, backend=backend)
    index = torch.cat([torch.arange(13).split(sizes.tolist())[chunk] for chunk in order.tolist()])
    assert torch.equal(moved.cpu(), rows.detach().cpu()[index])
    assert moved_probs is not None
    assert torch.equal(moved_probs.cpu(), probs.detach().cpu()[index])
    upstream = [noise(13, 10, dtype=dtype, seed=7), noise(13, dtype=torch.float32, seed=8)]
    grads = torch.autograd.grad(
        [moved, moved_probs], [rows, probs], [x.to(device) for x in upstream], retain_graph=True
    )
    for grad, given in zip(grads, upstream, strict=True):
        assert torch.equal(grad.cpu()[index], given)
    alone, nothing = sort_chunks(rows, sizes.to(device), order.to(device), backend=backend)
    assert torch.equal(alone, moved)
    assert nothing is None
    (grad,) = torch.autograd.grad(moved_probs.sum(), [probs])
    assert torch.equal(grad, torch.ones_like(probs))
