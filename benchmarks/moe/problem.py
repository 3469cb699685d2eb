"""One MoE layer on the ranks of a link bed, and how variants of its step are timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tp_overlap.cells import slowest

DEVIATION = 1e-6
_PAUSE = 0.25
Step = Callable[[], dict[str, Tensor]]
"""Forward and backward, which return results and gradients by name."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement.

    Attributes:
        tokens: of each rank.
        hidden: width of a token.
        ffn: of each routed expert.
        shared: of the shared expert.
        experts: of all ranks.
        topk: experts of a token.
        rounds: each runs every variant once.
    """

    tokens: int = 2048
    hidden: int = 1024
    ffn: int = 512
    shared: int = 512
    experts: int = 8
    topk: int = 2
    rounds: int = 9


QUICK = Sizes(tokens=64, hidden=64, ffn=32, shared=32, rounds=1)


@dataclass(frozen=True)
class Timing:
    """Seconds of one step: of the slowest rank, and of this rank's processor in all of its threads.

    Attributes:
        wall: of one call, or the least of several.
        processor: the same.
        median: of the wall times of several calls.
    """

    wall: float
    processor: float
    median: float = math.nan


def start(**switches: Any) -> None:
    """Features on, all ranks one expert parallel group."""
    import mindspeed_dsa

    mindspeed_dsa.enable(**switches)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def layer(sizes: Sizes, **overrides: Any) -> Any:
    """A MoE layer of Megatron's local specification, in fp32 with SwiGLU, whose router spreads evenly."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": sizes.hidden,
        "num_attention_heads": 8,
        "ffn_hidden_size": sizes.ffn,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": False,
        "num_moe_experts": sizes.experts,
        "moe_ffn_hidden_size": sizes.ffn,
        "moe_shared_expert_intermediate_size": sizes.shared,
        "moe_router_topk": sizes.topk,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": dist.get_world_size(),
        "expert_tensor_parallel_size": 1,
        "transformer_impl": "local",
    }
    cfg = TransformerConfig(**{**values, **overrides})
    spec = get_gpt_layer_local_spec(cfg.num_moe_experts, moe_grouped_gemm=cfg.moe_grouped_gemm)
    built = build_module(spec.submodules.mlp, config=cfg)
    built.set_layer_number(1)
    return built


def step_of(built: Any, sizes: Sizes) -> Step:
    """Forward and backward of a layer, from random tokens ``[tokens, 1, hidden]`` and a random gradient."""
    noise = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(sizes.tokens, 1, sizes.hidden, generator=noise)
    grad = torch.randn(rows.shape, generator=noise)

    def step() -> dict[str, Tensor]:
        built.zero_grad(set_to_none=True)
        leaf = rows.detach().requires_grad_()
        output = built(leaf)[0]
        output.backward(grad)
        weights = {name: weight.grad for name, weight in built.named_parameters()}
        return {"output": output.detach(), "input": leaf.grad, **weights}

    return step


def timed(work: Callable[[], object]) -> Timing:
    """One call on all ranks, which start together after a pause.

    Connections that have rested begin slowly, and between the transfers of a training step they rest.
    """
    time.sleep(_PAUSE)
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    work()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return Timing(slowest(wall), processor)


def minima(
    works: Mapping[str, Callable[[], object]], rounds: int, prepare: Callable[[str], object] | None = None
) -> dict[str, Timing]:
    """Least times and medians of several alternating variants; the first round is discarded.

    Each round begins with a different one: the previous variant affects caches and connections.

    Args:
        works: by name.
        rounds: each calls every variant once.
        prepare: gets a variant's name before it is called; not timed.
    """
    found: dict[str, list[Timing]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if prepare is not None:
                prepare(name)
            timing = timed(works[name])
            if number:
                found[name].append(timing)
    return {name: summary(times) for name, times in found.items()}


def summary(times: Sequence[Timing]) -> Timing:
    """Least times and median of several calls."""
    wall = [each.wall for each in times]
    return Timing(min(wall), min(each.processor for each in times), statistics.median(wall))


def deviation(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest relative difference of all ranks, infinite where there is no number.

    Raises:
        RuntimeError: it is above 1e-6; the same on all ranks.
    """
    worst = 0.0
    for name, expected in theirs.items():
        found = float((ours[name] - expected).norm() / expected.norm())
        worst = max(worst, math.inf if math.isnan(found) else found)
    worst = slowest(worst)
    if worst > DEVIATION:
        raise RuntimeError(f"moe: results differ from stock by {worst:.1e}; the variant is not timed")
    return worst
