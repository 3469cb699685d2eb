"""Steps of paired forwards and backwards, EP2 without a pipeline: the hidden fraction of transfers.

A step of one microbatch has no pair: it is only the warmup and the cooldown of a longer one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.model import deterministic_layers
from benchmarks.moe import problem
from benchmarks.moe.overlap import copy_rows
from benchmarks.moe.problem import deviation, minima, start
from benchmarks.pipeline.dense_steps import VOCABULARY, forward_step
from benchmarks.registry import Metrics

SWITCH = {"moe_fb_overlap": True}
OTHER = {"moe_alltoall_overlap_comm": True}


@dataclass(frozen=True)
class Sizes(problem.Sizes):
    """Sizes of the measurement, including an MoE layer's.

    Attributes:
        layers: number of layers, all with experts.
        microbatches: microbatches of a step.
        sequences: sequences of a microbatch, of length ``tokens``.
    """

    layers: int = 4
    microbatches: int = 4
    sequences: int = 1
    tokens: int = 512
    ffn: int = 256
    topk: int = 4
    rounds: int = 2


QUICK = Sizes(layers=2, microbatches=2, tokens=32, hidden=64, ffn=32, shared=32, rounds=1)


VARIANTS = ("stock", "pairs", "overlap in one microbatch", "no transfers")
ENDS = ("stock", "pairs", "no transfers")
"""Variants that are also measured with a step of one microbatch."""


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries."""
    with LinkBed(2, link) as bed:
        found = bed.run("benchmarks.pipeline.pairs:measure", sizes=QUICK if quick else Sizes())[0]
    print(f"pairs: {found}", file=sys.stderr, flush=True)
    return metrics(found)


def metrics(found: Mapping[str, Any]) -> Metrics:
    """Convert least times of steps to ratios.

    Args:
        found: result of :func:`measure`.
    """
    wall = {name: 1e3 * timing.wall for name, timing in found["times"].items()}
    edges = {name: wall[_alone(name)] for name in ENDS}
    return {
        "fb_overlap_speedup": wall["stock"] / wall["pairs"],
        "moe_overlap_speedup": wall["stock"] / wall["overlap in one microbatch"],
        "fb_over_moe_overlap": wall["overlap in one microbatch"] / wall["pairs"],
        "edge_a2a_hidden": (edges["stock"] - edges["pairs"]) / (edges["stock"] - edges["no transfers"]),
        **hidden(found),
    }


def hidden(found: Mapping[str, Any]) -> Metrics:
    """Return the fraction of a stock step's all-to-alls that pairs hide, and all times.

    Args:
        found: result of :func:`measure`.
    """
    wall = {name: 1e3 * timing.wall for name, timing in found["times"].items()}
    # The two steps differ only in their transfers.
    exposed = wall["stock"] - wall["no transfers"]
    return {
        "a2a_hidden_fraction": (wall["stock"] - wall["pairs"]) / exposed,
        "exposed_over_step": exposed / wall["stock"],
        "milliseconds": wall,
        "milliseconds_median": {name: 1e3 * each.median for name, each in found["times"].items()},
        "processor_milliseconds": {name: 1e3 * each.processor for name, each in found["times"].items()},
        "deviation": found["deviation"],
    }


def _alone(name: str) -> str:
    return f"{name}, one microbatch"


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return times of a step's variants, the same on all ranks."""
    start(**SWITCH)
    step = step_of(sizes)
    # Two microbatches are the shortest step with a pair.
    expected = step("stock", 2)
    worst = deviation(step("pairs", 2), expected)
    _arm("overlap in one microbatch")
    worst = max(worst, deviation(step("overlap in one microbatch", 2), expected))

    def variant(name: str, microbatches: int) -> Callable[[], object]:
        return lambda: step(name, microbatches)

    works = {name: variant(name, sizes.microbatches) for name in VARIANTS}
    works |= {_alone(name): variant(name, 1) for name in ENDS}
    return {"deviation": worst, "times": minima(works, sizes.rounds, _arm)}


def _arm(name: str) -> None:
    """Enable the feature of a variant; the two features exclude each other."""
    import mindspeed_dsa

    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**(OTHER if name == "overlap in one microbatch" else SWITCH))


def step_of(
    sizes: Sizes, prepare: Callable[[Any], None] | None = None, **overrides: Any
) -> Callable[..., dict[str, Tensor]]:
    """Return a training step without the optimizer's, by variant and number of microbatches.

    The step returns losses and gradients. Variants that begin with ``pairs`` take Megatron's schedule of
    pairs. ``no transfers`` takes a copy in place of every all-to-all, so that rows are wrong. All others are
    Megatron's step as currently patched.

    Args:
        sizes: sizes of the model and the step.
        prepare: function called with the model.
        **overrides: arguments of the model's configuration.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func

    cfg = _configuration(sizes, **overrides)
    chunk = GPTModel(
        config=cfg,
        transformer_layer_spec=get_gpt_layer_local_spec(cfg.num_moe_experts, moe_grouped_gemm=False),
        vocab_size=VOCABULARY,
        max_sequence_length=sizes.tokens,
        position_embedding_type="rope",
    )
    if prepare is not None:
        prepare(chunk)
    model = DistributedDataParallel(cfg, DistributedDataParallelConfig(), chunk)
    # Gradients are reduced only after the last microbatch.
    cfg.no_sync_func = model.no_sync
    noise = torch.Generator().manual_seed(dist.get_rank())
    shape = (sizes.microbatches, sizes.sequences, sizes.tokens + 1)
    batch = torch.randint(0, VOCABULARY, shape, generator=noise)

    def step(name: str, microbatches: int = sizes.microbatches) -> dict[str, Tensor]:
        cfg.overlap_moe_expert_parallel_comm = name.startswith("pairs")
        model.zero_grad_buffer()
        with copies() if name == "no transfers" else contextlib.nullcontext():
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batch[:microbatches]),
                model=model,
                num_microbatches=microbatches,
                seq_length=sizes.tokens,
                micro_batch_size=sizes.sequences,
                forward_only=False,
            )
        gradients = {name: weight.main_grad.clone() for name, weight in chunk.named_parameters()}
        return {"losses": torch.stack([each["loss"] for each in losses]), **gradients}

    return step


def _configuration(sizes: Sizes, **overrides: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **deterministic_layers(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=8,
            ffn_hidden_size=sizes.ffn,
            masked_softmax_fusion=False,
            num_moe_experts=sizes.experts,
            moe_ffn_hidden_size=sizes.ffn,
            moe_shared_expert_intermediate_size=sizes.shared,
            moe_router_topk=sizes.topk,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            expert_model_parallel_size=dist.get_world_size(),
            expert_tensor_parallel_size=1,
            transformer_impl="local",
            **overrides,
        )
    )


@contextlib.contextmanager
def copies() -> Iterator[None]:
    """Copy in place of every all-to-all in the block; the rows are then wrong."""
    with mock.patch.object(dist, "all_to_all_single", copy_rows):
        yield
