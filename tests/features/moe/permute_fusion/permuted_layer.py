"""Worker functions: a MoE layer with the fused permutation, and the stock layer."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import model, moe

SWITCH = {"moe_permute_fusion": True}


def beside_stock(
    runs: Mapping[str, Mapping[str, Any]], tp: int = 1, ep: int = 1, etp: int = 1
) -> dict[str, Any]:
    """Return stock's and our results of each run, and the dispatcher's calls of our operator.

    Args:
        runs: dict from name to the keyword arguments of :func:`run`.
        tp: tensor parallel size.
        ep: expert parallel size.
        etp: expert tensor parallel size.
    """
    model.start(tp=tp, ep=ep, etp=etp)
    layout = {"tp": tp, "ep": ep, "expert_tensor_parallel_size": etp}
    theirs = {name: run(**layout, **arguments) for name, arguments in runs.items()}
    switch_on()
    results: dict[str, Any] = {}
    for name, arguments in runs.items():
        with counted() as calls:
            ours = run(**layout, **arguments, **SWITCH)
        results[name] = {"ours": ours, "theirs": theirs[name], "calls": dict(calls)}
    return results


def switch_on(**more: Any) -> None:
    """Turn the feature on; the process groups exist already."""
    import mindspeed_dsa

    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**model.DSA_ON, **SWITCH, **more)


def run(
    tp: int,
    ep: int,
    rows: Sequence[int] = (6, 5),
    dtype: str = "float32",
    favourites: Sequence[int] = (),
    absent: Sequence[int] = (),
    **overrides: Any,
) -> dict[str, Any]:
    """Run the forward of all microbatches, then their backward.

    Args:
        tp: tensor parallel size.
        ep: expert parallel size.
        rows: number of rows per microbatch on this rank.
        dtype: dtype of parameters and tokens.
        favourites: experts that every token goes to.
        absent: ranks without tokens.
        **overrides: config fields that differ from the layer's.
    """
    kind = getattr(torch, dtype)
    cfg = moe.config(tp, ep, params_dtype=kind, **overrides)
    built = moe.layer(cfg)
    if favourites:
        prefer(built, favourites)
    rank = dist.get_rank()
    counts = [0] * len(rows) if rank in absent else rows
    inputs = [
        moe.tokens(count, seed=100 * rank + 10 * index, dtype=kind) for index, count in enumerate(counts)
    ]
    return moe.train(built, inputs)


def prefer(built: Any, favourites: Sequence[int]) -> None:
    """Route every token to these experts, with probabilities that still learn."""
    routing = built.router.routing

    def biased(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        bias = torch.zeros(logits.size(-1))
        # Large and distinct, so that the order of favourites is fixed.
        bias[list(favourites)] = torch.arange(50.0, 50.0 - len(favourites), -1.0)
        return routing(logits + bias, *args, **kwargs)

    built.router.routing = biased


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count our operator's calls by Megatron's functions, and calls that add a shared expert's output."""
    from mindspeed_dsa.features.moe.permute_fusion import permutation

    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        function = getattr(permutation, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            calls["added"] += kwargs.get("addend") is not None
            return function(*args, **kwargs)

        return mock.patch.object(permutation, name, call)

    with counting("permute"), counting("unpermute"), counting("sort_chunks"):
        yield calls


def consumers() -> dict[str, Any]:
    """Return the dispatcher module's functions and the config's checks, with the feature and after it."""
    import mindspeed_dsa

    model.start(SWITCH)
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    from mindspeed_dsa.features.moe.permute_fusion.feature import NAMES

    names = ("permute", "unpermute", "sort_chunks_by_idxs")
    homes = {name: inspect.unwrap(getattr(token_dispatcher, name)).__code__.co_filename for name in names}
    result = {
        "same": [getattr(token_dispatcher, name) is getattr(moe_utils, name) for name in names],
        "ours": ["permute_fusion" in home for home in homes.values()],
        "names": [callable(getattr(moe_utils, name, None)) for name in NAMES],
        "kernels": through_the_names(moe_utils),
    }
    mindspeed_dsa.disable()
    result["after"] = [getattr(moe_utils, name, None) for name in NAMES]
    result["refused"] = model.error_of("tests.support.moe:config", **SWITCH)
    return result


def through_the_names(moe_utils: Any) -> list[bool]:
    """Compare the five functions with Transformer Engine's signatures with Megatron's own code."""
    noise = torch.Generator().manual_seed(3)
    tokens = torch.randn(6, 8, generator=noise)
    routing_map = torch.zeros(6, 4, dtype=torch.bool)
    routing_map.scatter_(1, torch.rand(6, 4, generator=noise).topk(2, 1).indices, True)
    probs = torch.rand(6, 4, generator=noise)
    rows, row_probs, order = moe_utils.permute(tokens, routing_map, probs=probs, num_out_tokens=12)[:3]
    ours, row_map = moe_utils.fused_permute(tokens, routing_map, num_out_tokens=12)
    with_probs = moe_utils.fused_permute_with_probs(tokens, probs, routing_map, num_out_tokens=12)
    sums = moe_utils.unpermute(rows, order, tokens.shape, probs=probs, routing_map=routing_map)
    weighted = moe_utils.fused_unpermute(ours, row_map, merging_probs=probs, restore_shape=tokens.shape)
    sizes, places = torch.tensor([5, 3, 4]), torch.tensor([2, 0, 1])
    chunks, chunk_probs = moe_utils.sort_chunks_by_idxs(rows, sizes, places, probs=row_probs)
    both = moe_utils.fused_sort_chunks_by_index_with_probs(rows, row_probs, sizes, places)
    return [
        ours.equal(rows),
        with_probs[0].equal(rows),
        with_probs[1].equal(row_probs),
        torch.allclose(weighted, sums),
        moe_utils.fused_sort_chunks_by_index(rows, sizes, places).equal(chunks),
        both[0].equal(chunks),
        both[1].equal(chunk_probs),
    ]


def train_model(fused: bool, **arguments: Any) -> dict[str, Any]:
    """Run ``model.run`` with three layers including MLA and DSA; also return our operator's calls."""
    switch = SWITCH if fused else {}
    with counted() as calls:
        result = model.run(switch, {"num_layers": 3, **switch}, num_microbatches=2, **arguments)
    return {**result, "calls": dict(calls)}
