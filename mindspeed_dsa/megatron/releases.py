"""Differences between releases of Megatron-core that several features meet, in one place.

Each function asks for what is there, a parameter or an attribute, and never for a version: forks that have
taken over a part of a later release are served as well. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from mindspeed_dsa.feature import Megatron

SERVED = ">=0.12.1,<0.21"
"""Releases whose optimizers, buffers and layers these functions know."""


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


# -- layers --------------------------------------------------------------------------------------


def virtual_stage(block: Any, megatron: Megatron) -> int | None:
    """Return which chunk of its stage a ``TransformerBlock`` is; ``None`` without virtual stages.

    Before 0.13 a block does not know, and Megatron keeps the number of the chunk that is being built.
    """
    if hasattr(block, "vp_stage"):
        stage: int | None = block.vp_stage
    else:
        stage = megatron("core.parallel_state").get_virtual_pipeline_model_parallel_rank()
    return stage


def layers_of_chunk(block: Any, chunk: int, megatron: Megatron) -> int:
    """Return how many layers a chunk of this block's pipeline stage has.

    Args:
        block: a ``TransformerBlock`` of the stage.
        chunk: any of the stage's.
        megatron: whose.
    """
    build = megatron("core.transformer.transformer_block").get_num_layers_to_build
    if not takes(build, "vp_stage"):
        with _being_built(chunk, megatron):
            return int(build(block.config))
    # Before 0.15 the rank is the global state's.
    rank = {"pp_rank": block.pg_collection.pp.rank()} if takes(build, "pp_rank") else {}
    return int(build(block.config, vp_stage=chunk, **rank))


@contextlib.contextmanager
def _being_built(chunk: int, megatron: Megatron) -> Iterator[None]:
    state = megatron("core.parallel_state")
    before = state.get_virtual_pipeline_model_parallel_rank()
    state.set_virtual_pipeline_model_parallel_rank(chunk)
    try:
        yield
    finally:
        state.set_virtual_pipeline_model_parallel_rank(before)


def grouped_experts(megatron: Megatron) -> tuple[type, ...]:
    """Return classes of experts with stacked weights; from 0.17 on Transformer Engine's alone."""
    experts = megatron("core.transformer.moe.experts")
    names = ("GroupedMLP", "TEGroupedMLP")
    return tuple(getattr(experts, name) for name in names if hasattr(experts, name))


def recomputes_shared_experts(moe_layer: Any) -> bool:
    """Return whether Megatron recomputes whole shared experts, which it can since 0.14."""
    return bool(getattr(moe_layer, "shared_experts_recompute", False))


@cache
def transformer_engine(megatron: Megatron) -> Any:
    """Return Megatron's module of Transformer Engine; ``None`` where it cannot be imported without that."""
    try:
        return megatron("core.extensions.transformer_engine")
    except ImportError:  # before 0.13
        return None


# -- optimizers and their buffers ----------------------------------------------------------------


def forget_shards(bucket_group: Any) -> None:
    """Drop the views of shards that a bucket group keeps since 0.14; it makes new ones of its buckets."""
    if hasattr(bucket_group, "cached_param_buffer_shard_list"):
        bucket_group.cached_param_buffer_shard_list = [None] * len(bucket_group.buckets)
