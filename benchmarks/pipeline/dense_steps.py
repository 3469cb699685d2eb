"""Training steps of a dense model on real pipeline ranks, with and without a feature."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.model import deterministic_layers

VOCABULARY = 256


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


def on_ranks(measure: str, ranks: int, chunks: int, sizes: Sizes) -> tuple[list[dict[str, Any]], int]:
    """Call a function on pipeline ranks, each with a core of its own where there are as many.

    Args:
        measure: ``module:function``, which takes the chunks of a rank and the sizes.
        ranks: how many.
        chunks: of a rank.
        sizes: of the model and the batch.

    Returns:
        What each rank has found, and the number of cores there are.
    """
    cores = sorted(os.sched_getaffinity(0))
    with LinkBed(ranks, None, [cores[rank % len(cores)] for rank in range(ranks)]) as bed:
        return bed.run(measure, chunks=chunks, sizes=sizes), len(cores)


def dense_step(
    chunks: int, sizes: Sizes, switches: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> Callable[[AbstractContextManager[Any]], dict[str, Tensor]]:
    """Return a training step without the optimizer's, which returns this rank's losses and gradients.

    Args:
        chunks: of a rank; there are as many pipeline ranks as processes.
        sizes: of the model and the batch.
        switches: for ``mindspeed_dsa.enable``.
        config: more of Megatron's configuration.

    Returns:
        What runs a step inside of the context that it is given.
    """
    import mindspeed_dsa

    mindspeed_dsa.enable(**switches)
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
    cfg = _configuration(chunks, sizes, config or {})
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

    def step(variant: AbstractContextManager[Any]) -> dict[str, Tensor]:
        for model in models:
            model.zero_grad_buffer()
        with variant:
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


def _configuration(chunks: int, sizes: Sizes, more: Mapping[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **deterministic_layers(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_attention_heads=8,
            masked_softmax_fusion=False,
            pipeline_model_parallel_size=dist.get_world_size(),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=chunks > 1,
            batch_p2p_comm=chunks == 1,
            transformer_impl="local",
            **more,
        )
    )


def _forward_step(iterator: Iterator[Tensor], model: Any) -> Any:
    tokens = next(iterator)
    places = torch.arange(tokens.size(1) - 1).unsqueeze(0)
    return model(tokens[:, :-1], places, None, labels=tokens[:, 1:]), _loss


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}
