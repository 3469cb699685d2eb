"""Steps with full recompute, in place and in bubbles, on real pipeline ranks that talk over loopback.

What a bubble hides is measured against the theory, by which a step gets shorter by ``(PP - 1) R``, ``R``
being the time in which a chunk recomputes its forward. Only a rank with a core of its own is idle in a
bubble: where ranks share cores, others compute meanwhile, and there is little to gain.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.model import deterministic_layers
from benchmarks.moe.problem import deviation, minima
from benchmarks.registry import Metrics

VOCABULARY = 256
SWITCH = {"recompute_in_bubble": True}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    layers: int = 4  # of the whole model
    microbatches: int = 4  # of one sequence each
    tokens: int = 256  # of a sequence
    hidden: int = 512  # width of a token
    rounds: int = 15  # each runs every variant once


QUICK = Sizes(microbatches=4, tokens=16, hidden=32, rounds=1)
LAYOUTS = {"PP2": (2, 1), "PP2 x VPP2": (2, 2), "PP4": (4, 1)}
"""Pipeline ranks and chunks per rank."""


def run(link: str, quick: bool) -> Metrics:
    """The cell's entries, with a caution where ranks share cores."""
    found = {name: _layout(*layout, QUICK if quick else Sizes()) for name, layout in LAYOUTS.items()}
    print(f"recompute: {found}", file=sys.stderr, flush=True)
    return {"recompute": found}


def _layout(ranks: int, chunks: int, sizes: Sizes) -> Metrics:
    cores = sorted(os.sched_getaffinity(0))
    shared = len(cores) < ranks
    with LinkBed(ranks, None, [cores[rank % len(cores)] for rank in range(ranks)]) as bed:
        of_ranks = bed.run("benchmarks.pipeline.recompute:measure", chunks=chunks, sizes=sizes)
    return metrics(of_ranks, _caution(ranks, len(cores)) if shared else None)


def metrics(of_ranks: Sequence[Mapping[str, Any]], caution: str | None = None) -> Metrics:
    """Convert times of steps to ratios: of medians, since a difference of two least times is chance twice.

    Args:
        of_ranks: what :func:`measure` returns on each.
        caution: what is to be known of these figures.
    """
    again = 1e3 * statistics.mean(each["again"] for each in of_ranks if each["again"] is not None)
    median = {name: 1e3 * timing.median for name, timing in of_ranks[0]["times"].items()}
    least = {name: 1e3 * timing.wall for name, timing in of_ranks[0]["times"].items()}

    def removed(wall: Mapping[str, float]) -> float:
        return (wall["plain"] - wall["bubble"]) / ((len(of_ranks) - 1) * again)

    return {
        "recompute_in_bubble_removed": removed(median),
        "recompute_in_bubble_removed_least": removed(least),
        "step_ratio": median["bubble"] / median["plain"],
        "step_ratio_least": least["bubble"] / least["plain"],
        "milliseconds_median": median,
        "milliseconds": least,
        "chunk_recompute_milliseconds": again,
        "deviation": max(each["deviation"] for each in of_ranks),
        **({"caution": caution} if caution else {}),
    }


def _caution(ranks: int, cores: int) -> str:
    return (
        f"{ranks} ranks share {cores} cores: while one waits for its gradient another computes on its core, "
        "so little time is idle that recomputation could fill; this is not the gain of ranks with cores of "
        "their own"
    )


def measure(chunks: int, sizes: Sizes) -> dict[str, Any]:
    """Times of both variants and of a chunk's recomputation; times are the same on all ranks."""
    step = _step(chunks, sizes)
    seconds: list[float] = []

    def variant(name: str) -> Callable[[], object]:
        return lambda: step(name, seconds)

    found = {
        "deviation": deviation(step("bubble", []), step("plain", [])),
        "times": minima({name: variant(name) for name in ("plain", "bubble")}, sizes.rounds),
    }
    # A segment is a layer. The last rank of a pipeline without virtual stages waits for no gradient.
    layers = sizes.layers // (dist.get_world_size() * chunks)
    return {**found, "again": layers * statistics.median(seconds) if seconds else None}


def _step(chunks: int, sizes: Sizes) -> Callable[[str, list[float]], dict[str, Tensor]]:
    """A training step without the optimizer's; returns losses and gradients of this rank.

    ``bubble`` recomputes ahead of gradients that a rank waits for, and adds the seconds of each segment to a
    list; ``plain`` is Megatron's own.
    """
    import mindspeed_dsa

    mindspeed_dsa.enable(**SWITCH)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=dist.get_world_size(),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    cfg = _configuration(chunks, sizes)
    models = []
    for stage in range(chunks):
        place = {"ignore_virtual": False, "vp_stage": stage if chunks > 1 else None}
        chunk = GPTModel(
            config=cfg,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=sizes.tokens,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            position_embedding_type="rope",
            vp_stage=place["vp_stage"],
        )
        models.append(DistributedDataParallel(cfg, DistributedDataParallelConfig(), chunk))
    batch = torch.randint(
        0, VOCABULARY, (sizes.microbatches, 1, sizes.tokens + 1), generator=torch.Generator().manual_seed(0)
    )

    def step(name: str, seconds: list[float]) -> dict[str, Tensor]:
        for model in models:
            model.zero_grad_buffer()
        with _plain() if name == "plain" else _timed(seconds):
            losses = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=[iter(batch) for _ in models] if chunks > 1 else iter(batch),
                model=models if chunks > 1 else models[0],
                num_microbatches=sizes.microbatches,
                seq_length=sizes.tokens,
                micro_batch_size=1,
                forward_only=False,
            )
        gradients = {
            f"{index} {name}": weight.main_grad.clone()
            for index, model in enumerate(models)
            for name, weight in model.named_parameters()
        }
        return gradients | {f"loss {index}": each["loss"] for index, each in enumerate(losses)}

    return step


def _configuration(chunks: int, sizes: Sizes) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **deterministic_layers(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=8,
            masked_softmax_fusion=False,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            pipeline_model_parallel_size=dist.get_world_size(),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=chunks > 1,
            batch_p2p_comm=chunks == 1,
            transformer_impl="local",
        )
    )


def _forward_step(iterator: Iterator[Tensor], model: Any) -> Any:
    tokens = next(iterator)
    places = torch.arange(tokens.size(1) - 1).unsqueeze(0)
    return model(tokens[:, :-1], places, None, labels=tokens[:, 1:]), _loss


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    from mindspeed_dsa.features.pipeline.recompute_ahead.ahead import Ahead

    with mock.patch.object(Ahead, "begins", return_value=False):
        yield


@contextlib.contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    from mindspeed_dsa.features.pipeline.recompute_ahead import ahead

    original = ahead._recompute

    def recompute(*args: Any) -> None:
        begin = time.perf_counter()
        original(*args)
        seconds.append(time.perf_counter() - begin)

    with mock.patch.object(ahead, "_recompute", recompute):
        yield
