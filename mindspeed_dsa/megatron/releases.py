"""Functions that hide differences between Megatron-core releases from several features.

Functions test for a parameter or attribute, never for a version, so that forks with parts of a later release
work too. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from mindspeed_dsa.feature import Megatron

SERVED = ">=0.12.1,<0.21"
"""Releases whose optimizers, buffers and layers these functions support."""


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


# -- layers --------------------------------------------------------------------------------------


def virtual_stage(block: Any, megatron: Megatron) -> int | None:
    """Return the index of a ``TransformerBlock``'s chunk in its stage, or ``None`` without virtual stages."""
    # Before 0.13 a block does not store it. Megatron's global state then has the chunk that is being built.
    if hasattr(block, "vp_stage"):
        stage: int | None = block.vp_stage
    else:
        stage = megatron("core.parallel_state").get_virtual_pipeline_model_parallel_rank()
    return stage


def layers_of_chunk(block: Any, chunk: int, megatron: Megatron) -> int:
    """Return the number of layers of a chunk in this block's pipeline stage.

    Args:
        block: ``TransformerBlock`` of the stage.
        chunk: index of a chunk in the stage.
        megatron: session's Megatron.
    """
    build = megatron("core.transformer.transformer_block").get_num_layers_to_build
    if not takes(build, "vp_stage"):
        # Without the parameter, the function reads the chunk from the global state.
        with _being_built(chunk, megatron):
            return int(build(block.config))
    # Without pp_rank (before 0.15) the function reads the rank from the global state.
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
    """Return the expert classes with stacked weights; since 0.17 only Transformer Engine's."""
    experts = megatron("core.transformer.moe.experts")
    # Missing classes are skipped: since 0.17 there is no GroupedMLP.
    names = ("GroupedMLP", "TEGroupedMLP")
    return tuple(getattr(experts, name) for name in names if hasattr(experts, name))


def recomputes_shared_experts(moe_layer: Any) -> bool:
    """Return whether Megatron recomputes whole shared experts, which it supports since 0.14."""
    return bool(getattr(moe_layer, "shared_experts_recompute", False))


@cache
def transformer_engine(megatron: Megatron) -> Any:
    """Return Megatron's extension module for Transformer Engine, or ``None`` if it cannot be imported."""
    try:
        return megatron("core.extensions.transformer_engine")
    except ImportError:  # before 0.13
        return None


# -- optimizers and their buffers ----------------------------------------------------------------


def forget_shards(bucket_group: Any) -> None:
    """Drop a bucket group's cached shard views (since 0.14). It then creates new views of its buckets."""
    if hasattr(bucket_group, "cached_param_buffer_shard_list"):
        bucket_group.cached_param_buffer_shard_list = [None] * len(bucket_group.buckets)
