"""Training steps of a model on real pipeline ranks, with and without a feature, under any schedule."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.model import deterministic_layers, global_names

VOCABULARY = 256
Step = Callable[[AbstractContextManager[Any]], dict[str, Tensor]]
"""Runs a step inside the given context; returns this rank's losses and gradients by name."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    layers: int = 4  # layers of the whole model
    microbatches: int = 4  # microbatches of one sequence each
    tokens: int = 256  # tokens of a sequence
    hidden: int = 512  # width of a token
    rounds: int = 15  # a round runs every variant once


QUICK = Sizes(microbatches=4, tokens=16, hidden=32, rounds=1)
LAYOUTS = {"PP2": (2, 1), "PP2 x VPP2": (2, 2), "PP4": (4, 1)}
"""Pipeline ranks and chunks per rank."""


def on_ranks(measure: str, ranks: int, chunks: int, sizes: Sizes) -> tuple[list[dict[str, Any]], int]:
    """Call a function on pipeline ranks, each on its own core if there are enough.

    Args:
        measure: path ``module:function`` of a function of a rank's chunks and the sizes.
        ranks: number of pipeline ranks.
        chunks: chunks per rank.
        sizes: sizes of the model and the batch.

    Returns:
        The result of each rank, and the number of cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    with LinkBed(ranks, None, [cores[rank % len(cores)] for rank in range(ranks)]) as bed:
        return bed.run(measure, chunks=chunks, sizes=sizes), len(cores)


def dense_step(
    chunks: int, sizes: Sizes, switches: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> Step:
    """Return a training step of a dense model, on as many pipeline ranks as processes.

    Args:
        chunks: chunks per rank.
        sizes: sizes of the model and the batch.
        switches: arguments of ``mindspeed_dsa.enable``.
        config: additional arguments of Megatron's configuration.
    """
    import mindspeed_dsa

    mindspeed_dsa.enable(**switches)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=dist.get_world_size(),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return pipeline_step(chunks, sizes, config or {})


def pipeline_step(chunks: int, sizes: Sizes, config: Mapping[str, Any]) -> Step:
    """Return a training step without the optimizer's, given enabled features and process groups.

    Weights depend only on their names, and the batch only on the data parallel rank: a step gives the same
    losses and gradients for any placement of layers.

    Args:
        chunks: chunks per rank.
        sizes: sizes of the model and the batch.
        config: additional arguments of Megatron's configuration.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    cfg = _configuration(chunks, sizes, config)
    models = []
    for stage in range(chunks):
        place = {"ignore_virtual": False, "vp_stage": stage if chunks > 1 else None}
        chunk = GPTModel(
            config=cfg,
            transformer_layer_spec=get_gpt_layer_local_spec(cfg.num_moe_experts, moe_grouped_gemm=False),
            vocab_size=VOCABULARY,
            max_sequence_length=sizes.tokens,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            position_embedding_type="rope",
            vp_stage=place["vp_stage"],
        )
        _fill(chunk)
        models.append(DistributedDataParallel(cfg, DistributedDataParallelConfig(), chunk))
    noise = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    batch = torch.randint(0, VOCABULARY, (sizes.microbatches, 1, sizes.tokens + 1), generator=noise)

    def step(variant: AbstractContextManager[Any]) -> dict[str, Tensor]:
        # Look the schedule up now: other features may be on than when the model was built.
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in models:
            model.zero_grad_buffer()
        with variant:
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                # Each chunk reads the whole batch.
                data_iterator=[iter(batch) for _ in models] if chunks > 1 else iter(batch),
                model=models if chunks > 1 else models[0],
                num_microbatches=sizes.microbatches,
                seq_length=sizes.tokens,
                micro_batch_size=1,
                forward_only=False,
            )
        gradients = {
            name: weight.main_grad.clone()
            for model in models
            for name, weight in global_names(model.module).items()
        }
        return gradients | {f"loss {index}": each["loss"] for index, each in enumerate(losses)}

    return step


@torch.no_grad()
def _fill(chunk: torch.nn.Module) -> None:
    """Fill matrices by their names in the whole model; all other weights are ones."""
    for name, weight in global_names(chunk).items():
        if weight.dim() > 1:
            weight.normal_(std=0.02, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _configuration(chunks: int, sizes: Sizes, more: Mapping[str, Any]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **deterministic_layers(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=8,
            masked_softmax_fusion=False,
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            pipeline_dtype=torch.float32,
            # An interleaved schedule overlaps its messages, the plain one batches them.
            overlap_p2p_comm=chunks > 1,
            batch_p2p_comm=chunks == 1,
            transformer_impl="local",
            **more,
        )
    )


def forward_step(iterator: Iterator[Tensor], model: Any, return_schedule_plan: bool = False) -> Any:
    """Run one microbatch's forward, or return its plan, as Megatron's schedules request."""
    tokens = next(iterator)
    places = torch.arange(tokens.size(1) - 1).expand(tokens.size(0), -1)
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(tokens[:, :-1], places, None, labels=tokens[:, 1:]), _loss


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}
