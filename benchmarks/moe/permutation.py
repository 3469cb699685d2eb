"""Fused permutation of tokens by expert, compared with Megatron's functions: bytes and time on one core.

Makes an alltoall dispatcher's calls without the transfers, forward and backward: permute, sort chunks by
local expert, sort them back, unpermute, add a shared expert's output. Needs no link.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.registry import Metrics

SWITCH = {"moe_permute_fusion": True}
CASES = {
    # ranks, experts, top-k, dtype
    "ep1_8_experts_top2_fp32": (1, 8, 2, torch.float32),
    "ep2_8_experts_top2_fp32": (2, 8, 2, torch.float32),
    "ep1_64_experts_top6_fp32": (1, 64, 6, torch.float32),
    "ep2_64_experts_top6_fp32": (2, 64, 6, torch.float32),
    "ep2_64_experts_top6_bf16": (2, 64, 6, torch.bfloat16),
}
_TOKENS, _HIDDEN, _ROUNDS = 2048, 1024, 9


class Written(TorchDispatchMode):
    """Counter of the bytes of all results that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        returned = function._schema.returns
        if not any(each.alias_info is not None and not each.alias_info.is_write for each in returned):
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
        return results


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries; the link is not used."""
    import mindspeed_dsa

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mindspeed_dsa.enabled(**SWITCH):
            figures = {name: _measure(quick, *case) for name, case in CASES.items()}
    finally:
        torch.set_num_threads(threads)
    print(f"permutation: {figures}", file=sys.stderr, flush=True)
    return {"permutation": figures}


def _measure(quick: bool, ranks: int, experts: int, topk: int, dtype: torch.dtype) -> Metrics:
    tokens, hidden, rounds = (64, 32, 1) if quick else (_TOKENS, _HIDDEN, _ROUNDS)
    noise = torch.Generator().manual_seed(1)
    chosen = torch.rand(tokens, experts, generator=noise).topk(topk, 1).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    operands = [torch.randn(tokens, hidden, generator=noise).to(dtype) for _ in range(3)]
    probs = torch.rand(tokens, experts, generator=noise) * routing_map
    steps = {way: _step(way == "fused", ranks, routing_map, probs, *operands) for way in ("stock", "fused")}
    results = {way: step() for way, step in steps.items()}
    pairs = list(zip(results["fused"], results["stock"], strict=True))
    written, seconds = {}, dict.fromkeys(steps, float("inf"))
    for way, step in steps.items():
        with Written() as count:
            step()
        written[way] = count.bytes
    for _ in range(rounds):
        for way, step in steps.items():
            begin = time.process_time()
            step()
            seconds[way] = min(seconds[way], time.process_time() - begin)
    return {
        "bytes_written_over_stock": written["fused"] / written["stock"],
        "time_over_stock": seconds["fused"] / seconds["stock"],
        "mib_written": {way: each / 2**20 for way, each in written.items()},
        "milliseconds": {way: 1e3 * each for way, each in seconds.items()},
        "deviation": max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs),
    }


def _step(
    fused: bool, ranks: int, routing_map: Tensor, probs: Tensor, rows: Tensor, shared: Tensor, grad: Tensor
) -> Callable[[], list[Tensor]]:
    """Return a step there and back with gradients; as many rows arrive as were sent."""
    from megatron.core.transformer.moe import moe_utils

    from mindspeed_dsa.ops.moe_permute import unpermute

    experts, entries = routing_map.shape[1], int(routing_map.sum())
    chunks = torch.arange(experts)
    there, back = chunks.view(ranks, -1).t().ravel(), chunks.view(-1, ranks).t().ravel()
    sizes = routing_map.sum(0)

    def step() -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in (rows, probs, shared)]
        tokens, weights, added = leaves
        sent, sent_probs, row_map = moe_utils.permute(
            tokens, routing_map, probs=weights, num_out_tokens=entries, fused=fused
        )[:3]
        sorted_rows, sorted_probs = moe_utils.sort_chunks_by_idxs(
            sent, sizes, there, probs=sent_probs, fused=fused
        )
        returned, _ = moe_utils.sort_chunks_by_idxs(sorted_rows, sizes[there], back, fused=fused)
        if fused:
            output = unpermute(returned, row_map, len(tokens), addend=added)
        else:
            output = moe_utils.unpermute(returned, row_map, tokens.shape, routing_map=routing_map) + added
        grads = torch.autograd.grad([output, sorted_probs], leaves, [grad, torch.ones_like(sorted_probs)])
        return [output.detach(), *grads]

    return step
