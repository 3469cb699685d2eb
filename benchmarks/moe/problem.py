"""One MoE layer on the ranks of a link bed, and timing of its step's variants."""

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
"""Forward and backward; returns results and gradients by name."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement.

    Attributes:
        tokens: tokens per rank.
        hidden: width of a token.
        ffn: inner width of a routed expert.
        shared: inner width of the shared expert.
        experts: number of experts on all ranks.
        topk: experts per token.
        rounds: number of rounds; a round runs every variant once.
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
    """Seconds of one step.

    Attributes:
        wall: slowest rank's wall-clock time of one call, or the least of several.
        processor: this rank's CPU time in all threads of one call, or the least of several.
        median: median wall-clock time of several calls.
    """

    wall: float
    processor: float
    median: float = math.nan


def start(**switches: Any) -> None:
    """Enable features, and make all ranks one expert parallel group."""
    import mindspeed_dsa

    mindspeed_dsa.enable(**switches)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def layer(sizes: Sizes, **overrides: Any) -> Any:
    """Build a MoE layer of Megatron's local specification, fp32 with SwiGLU; its router spreads evenly."""
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
    """Return forward and backward of a layer, on random tokens ``[tokens, 1, hidden]``."""
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
    """Time one call on all ranks, which start together after a pause."""
    # Idle connections begin slowly, and between the transfers of a training step they are idle.
    time.sleep(_PAUSE)
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    work()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return Timing(slowest(wall), processor)


def minima(
    works: Mapping[str, Callable[[], object]], rounds: int, prepare: Callable[[str], object] | None = None
) -> dict[str, Timing]:
    """Return least times and medians of several alternating variants; the first round is discarded.

    Args:
        works: variants by name.
        rounds: number of rounds; each calls every variant once.
        prepare: untimed function called with a variant's name before the variant.
    """
    samples: dict[str, list[Timing]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds + 1):
        # Begin each round with another variant: the previous one affects caches and connections.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if prepare is not None:
                prepare(name)
            timing = timed(works[name])
            if number:
                samples[name].append(timing)
    return {name: summary(times) for name, times in samples.items()}


def summary(times: Sequence[Timing]) -> Timing:
    """Return the least times and the median of several calls."""
    wall = [each.wall for each in times]
    return Timing(min(wall), min(each.processor for each in times), statistics.median(wall))


def deviation(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference over all ranks, infinite if it is not a number.

    Raises:
        RuntimeError: the difference exceeds 1e-6; all ranks raise it.
    """
    worst = 0.0
    for name, expected in theirs.items():
        found = float((ours[name] - expected).norm() / expected.norm())
        worst = max(worst, math.inf if math.isnan(found) else found)
    worst = slowest(worst)
    if worst > DEVIATION:
        raise RuntimeError(f"moe: results differ from stock by {worst:.1e}; the variant is not timed")
    return worst
