"""What runs inside the pool's workers: DSA on context parallel ranks, its keys gathered by the test.

Nobody gathers keys for DSA yet; what computes with gathered ones is watched here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import model as job

SEQUENCE = 24  # two chunks for each of up to four ranks


class WholeSequence(torch.autograd.Function):
    """All ranks' rows, in the order of the sequence; gradients of all ranks' copies are summed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dim: int) -> Tensor:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(rows.contiguous()) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        positions = [torch.empty_like(job.own_positions(rows.size(dim) * group.size())) for _ in parts]
        dist.all_gather(positions, job.own_positions(rows.size(dim) * group.size()), group=group)
        ctx.group, ctx.dim, ctx.own = group, dim, positions[group.rank()]
        return torch.cat(parts, dim).index_select(dim, torch.cat(positions).argsort())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.index_select(ctx.dim, ctx.own), None


@contextlib.contextmanager
def context_parallel(
    builder: ModuleType, cp: int, gathered: tuple[str, ...] = ("key", "index key"), in_config: bool = True
) -> Iterator[None]:
    """Models of ``builder`` train on ``cp`` ranks, which Megatron and the library refuse before 0.19.

    Megatron's own indexer finds the number in the configuration, where that of the backport refuses it.
    """
    from mindspeed_dsa.features.attention.dsa.problem import IndexInputs

    build_config, build_model, from_megatron = builder.config, builder.gpt_model, IndexInputs.from_megatron

    def config(**overrides: Any) -> Any:
        cfg = build_config(**overrides)
        cfg.context_parallel_size = cp if in_config else 1
        return cfg

    def gpt_model(*args: Any, **kwargs: Any) -> Any:
        model = build_model(*args, **kwargs)
        for module in model.modules():
            if type(module).__name__ == "DSAttention" and "key" in gathered:
                module.forward = with_whole_keys(module.forward)
        return model

    def whole_index_key(query: Tensor, key: Tensor, weights: Tensor) -> Any:
        return from_megatron(query, WholeSequence.apply(key, 0) if "index key" in gathered else key, weights)

    with (
        mock.patch.object(job, "SEQUENCE", SEQUENCE),
        mock.patch.object(builder, "config", config),
        mock.patch.object(builder, "gpt_model", gpt_model),
        mock.patch.object(IndexInputs, "from_megatron", whole_index_key),
    ):
        yield


def with_whole_keys(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def gathering(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        key = WholeSequence.apply(key, 0)
        if value.dim() == 4:  # not the up-projection of the absorbed form
            value = WholeSequence.apply(value, 0)
        return forward(query, key, value, *args, **kwargs)

    return gathering


def step(
    cp: int, gathered: tuple[str, ...] = ("key", "index key"), num_microbatches: int = 2, **arguments: Any
) -> dict[str, Any]:
    """As :func:`job.run`, with the indexer loss that is logged."""
    with context_parallel(job, cp, gathered):
        result = job.run(num_microbatches=num_microbatches, micro_batch_size=2, cp=cp, **arguments)
    return {**result, "indexer loss": logged_indexer_loss(num_microbatches)}


def logged_indexer_loss(num_microbatches: int) -> float:
    from mindspeed_dsa.context import Megatron
    from mindspeed_dsa.features.attention.indexer_loss import indexer_loss

    losses: dict[str, Tensor] = {}
    tracker = indexer_loss(Megatron()).tracker
    tracker.track_indexer_metrics(1 / num_microbatches, 1, None, total_loss_dict=losses)
    return float(losses["indexer loss"])


def rotated(cp: int, rope_type: str) -> dict[str, Tensor]:
    """A rank's rows of seeded states after MLA's rotation, and where they lie in the sequence."""
    job.start({"use_fused_dsa": True}, cp=cp)
    from mindspeed_dsa.context import Megatron
    from mindspeed_dsa.features.attention.mla_projections import Projections

    attention = job.gpt_model(job.config(rope_type=rope_type)).decoder.layers[0].self_attention
    states, own = seeded(SEQUENCE, 2, 4, 8), job.own_positions(SEQUENCE)
    rotate = Projections(attention, Megatron()).rotation(own.numel())
    return {"positions": own, "rows": rotate(states[own])}


def backport_indexer(cp: int, rope_type: str) -> dict[str, Tensor]:
    """A rank's rows of what the indexer for older releases projects, and where they lie in the sequence."""
    job.start({"use_fused_dsa": True}, cp=cp)
    return index_rows(backport_spec().submodules.indexer, job.config(rope_type=rope_type))


def backport_spec() -> Any:
    """The core attention for older releases, with the options of no switch."""
    from mindspeed_dsa import session
    from mindspeed_dsa.context import Megatron
    from mindspeed_dsa.features.attention.adapters.backport.attention import core_attention_spec
    from mindspeed_dsa.features.attention.adapters.backport.options import Options

    settings, _ = session.resolve({}, ())
    return core_attention_spec(Options.of(settings), Megatron())


def index_rows(spec: Any, cfg: Any) -> dict[str, Tensor]:
    from megatron.core.transformer.spec_utils import build_module

    torch.manual_seed(0)
    indexer = build_module(spec, config=cfg)
    own = job.own_positions(SEQUENCE)
    x, qr = seeded(SEQUENCE, 2, cfg.hidden_size), seeded(SEQUENCE, 2, cfg.q_lora_rank)
    query, key, weights = indexer.forward_before_topk(x[own], qr[own])
    return {"positions": own, "rows": torch.cat([query.flatten(2), key, weights], dim=-1).detach()}


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def in_order(ranks: list[Mapping[str, Tensor]]) -> Tensor:
    """The whole sequence from all ranks' rows."""
    rows = torch.cat([rank["rows"] for rank in ranks])
    return rows[torch.cat([rank["positions"] for rank in ranks]).argsort()]
