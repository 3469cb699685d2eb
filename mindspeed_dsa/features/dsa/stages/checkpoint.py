"""Distributed checkpoints that go from one stage of DSA training to the next.

A stage's checkpoint has the optimizer's state of what it trains. Another stage reads of it what goes on
training, by the names of parameters; what is new begins with its weights, moments of zero and step 0. Formats
that have whole buffers of the distributed optimizer instead of parameters are refused.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.stages import layers
from mindspeed_dsa.features.dsa.stages.optimizer_state import (
    BOTH,
    ENTRY,
    INDEXERS,
    OTHERS,
    buffers_refused,
    counts_here,
    tell,
    trained_by,
    trained_in,
)
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.patches.errors import SettingsError

_OPTIMIZER, _READ = "optimizer", "dsa_stage_optimizer"
_TYPE = "param_state_sharding_type"
_CHAINED = re.compile(r"^chained_\d+\.")
_BUFFERS = re.compile(r"optimizer\.distributed\.dp_group_idx_\d+\.")


@dataclass(frozen=True)
class _Saved:
    """A checkpoint's contents.

    Attributes:
        shapes: of its tensors, by key; objects have an empty one.
        common: what is not sharded, of its optimizers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    common: list[Mapping[str, Any]]

    @property
    def entry(self) -> Mapping[str, Any]:
        """Facts saved beside the optimizer's state."""
        entries = [part[ENTRY] for part in self.common if ENTRY in part]
        return entries[0] if entries else {}

    @property
    def trained(self) -> frozenset[str]:
        """Parameters whose state it has, by their names where nothing else says so."""
        if "trained" in self.entry:
            return trained_by(self.entry)
        states = [key for key in self.shapes if "optimizer.state." in key]
        found = {INDEXERS if layers.of_indexer(key) else OTHERS for key in states}
        return frozenset(found) if found else BOTH

    @property
    def count(self) -> float | None:
        """Steps that the optimizer has done; None if it does not count."""
        for part in self.common:
            inner = part.get("optimizer", part)
            steps = [inner.get("state", {}).get("common_step")]
            steps += [group.get("step") for group in inner.get("param_groups", ())]
            known = [step for step in steps if step is not None]
            if known:
                return float(known[0])
        return None

    def key(self, key: str) -> str | None:
        """Return under which key it has what a chain of optimizers, as long as it may be, calls ``key``."""
        return next((name for name in _names(key) if name in self.shapes), None)


def _names(key: str) -> tuple[str, ...]:
    """Return what a key of an optimizer's state is in a checkpoint of any chain, which may number links."""
    bare = _CHAINED.sub("", key)
    return (key, bare, *(f"chained_{index}.{bare}" for index in range(4)))


def load_across_stages(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``dist_checkpointing.load``."""

    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        models = context.state(layers.Models)
        if models.config is None or not isinstance(sharded_state_dict, dict):
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        saved = _read(checkpoint_dir, context)
        wanted = layers.checked(sharded_state_dict, checkpoint_dir, saved.shapes, context)
        here = trained_in(context.options.stage)
        if _OPTIMIZER not in wanted or not saved.common or saved.trained == here:
            return original(wanted, checkpoint_dir, *args, **kwargs)
        _check_format(saved, here)
        tell(context, saved.trained, here)
        reading = _Reading(saved, context)
        state = reading.take(wanted[_OPTIMIZER])
        rest = {key: value for key, value in wanted.items() if key != _OPTIMIZER}
        result = original({**rest, _READ: reading.wanted}, checkpoint_dir, *args, **kwargs)
        loaded = result[0] if isinstance(result, tuple) else result
        loaded[_OPTIMIZER] = reading.filled(state, loaded.pop(_READ, {}))
        return result

    return load


def cut_without_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``DistributedOptimizer.sharded_param_state_fully_reshardable``.

    It joins the buckets of a buffer without the padding at their ends, and cuts parameters out at the places
    that they have with it; Megatron-LM's main takes the padding off the places, as is done here.
    """

    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        places = [(buffer, buffer.param_index_map) for buffer in self.buffers]
        for buffer, padded in places:
            paddings = (bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets)
            before = [0, *itertools.accumulate(paddings)]
            buffer.param_index_map = {
                parameter: (start - before[bucket], end - before[bucket], bucket)
                for parameter, (start, end, bucket) in padded.items()
            }
        try:
            return original(self, *args, **kwargs)
        finally:
            for buffer, padded in places:
                buffer.param_index_map = padded

    return sharded_param_state_fully_reshardable


def _read(folder: Any, context: Context[Options]) -> _Saved:
    checkpoints: Any = context.megatron("core.dist_checkpointing.serialization")
    tensors = checkpoints.load_sharded_metadata(str(folder))
    shapes = {key: tuple(getattr(each, "global_shape", ())) for key, each in tensors.items()}
    common = checkpoints.load_common_state_dict(str(folder)).get(_OPTIMIZER)
    if not isinstance(common, dict):
        return _Saved(shapes, [])
    parts = [common[key] for key in sorted(common)] if all(isinstance(k, int) for k in common) else [common]
    return _Saved(shapes, parts)


def _check_format(saved: _Saved, here: frozenset[str]) -> None:
    if any(_BUFFERS.search(key) for key in saved.shapes):
        kinds = [str(part[_TYPE]) for part in saved.common if _TYPE in part]
        raise SettingsError(buffers_refused(saved.trained, here, kinds[0] if kinds else "slices of buffers"))


class _Reading:
    """Optimizer state of this stage, of which a checkpoint has a part.

    Args:
        saved: the checkpoint's contents.
        context: of the session.

    Attributes:
        wanted: what is read, by numbers.
    """

    def __init__(self, saved: _Saved, context: Context[Options]) -> None:
        self._saved, self._here = saved, trained_in(context.options.stage)
        self._mapping: Any = context.megatron("core.dist_checkpointing.mapping")
        self.wanted: dict[str, Any] = {}
        self._instead: dict[str, Any] = {}

    def take(self, state: Any) -> Any:
        """Return a state with a place for each shard; those that the checkpoint has are wanted."""
        if isinstance(state, dict):
            return {name: self.take(each) for name, each in state.items()}
        if isinstance(state, (list, tuple)):
            return [self.take(each) for each in state]
        if isinstance(state, self._mapping.LocalNonpersistentObject):
            return state.unwrap()
        factory = isinstance(state, self._mapping.ShardedTensorFactory)
        if not (factory or isinstance(state, self._mapping.ShardedTensor)):
            return state.data if isinstance(state, self._mapping.ShardedObject) else state
        place = _Place(str(len(self._instead)))
        self._instead[place.number] = torch.zeros_like(state.data)
        there = self._key_of_factory(state) if factory else self._saved.key(state.key)
        if there is not None:
            self.wanted[place.number] = replace(state, key=there)
        return place

    def _key_of_factory(self, factory: Any) -> str | None:
        """Return the key under which the shards of a factory are found."""
        for key in _names(factory.key):
            shards = _shards(replace(factory, key=key).build())
            if shards and all(shard.key in self._saved.shapes for shard in shards):
                return str(key)
        return None

    def filled(self, state: Any, loaded: Mapping[str, Any]) -> Any:
        """Return the state of the chain's optimizers with what has been loaded in its places."""
        if all(isinstance(key, int) for key in state):
            return {key: self._part(each, loaded) for key, each in state.items()}
        return self._part(state, loaded)

    def _part(self, state: Any, loaded: Mapping[str, Any]) -> dict[str, Any]:
        part: dict[str, Any] = self._put(state, loaded)
        inner, saved = part.get("optimizer", part), self._saved
        count, lag = saved.count, 0.0
        if count is not None:
            count, lag = counts_here(count, saved.trained, self._here, float(saved.entry.get("lag", 0.0)))
            self._set_count(inner, count)
        if "grad_scaler" in saved.common[0]:
            part["grad_scaler"] = saved.common[0]["grad_scaler"]
        new = sorted(self._here - saved.trained)
        return {**part, ENTRY: {"trained": sorted(self._here), "lag": lag, "new": new}}

    def _put(self, state: Any, loaded: Mapping[str, Any]) -> Any:
        if isinstance(state, dict):
            return {name: self._put(each, loaded) for name, each in state.items()}
        if isinstance(state, list):
            return [self._put(each, loaded) for each in state]
        if isinstance(state, _Place):
            return loaded.get(state.number, self._instead[state.number])
        return state

    def _set_count(self, inner: dict[str, Any], count: float) -> None:
        """Write a count of steps where the optimizer that saved has had its own."""
        saved = self._saved.common[0].get("optimizer", self._saved.common[0])
        common = saved.get("state", {}).get("common_step")
        if common is not None:
            like = torch.full_like(common, count) if isinstance(common, torch.Tensor) else type(common)(count)
            inner["state"] = {**inner["state"], "common_step": like}
        steps = [group["step"] for group in saved.get("param_groups", ()) if group.get("step") is not None]
        if steps:
            groups = inner["param_groups"]
            inner["param_groups"] = [{**group, "step": type(steps[0])(count)} for group in groups]


@dataclass(frozen=True)
class _Place:
    """Place of a tensor in a state."""

    number: str


def _shards(built: Any) -> list[Any]:
    """List the shards that a factory has built."""
    if isinstance(built, dict):
        return [shard for each in built.values() for shard in _shards(each)]
    if isinstance(built, (list, tuple)):
        return [shard for each in built for shard in _shards(each)]
    return [built]
