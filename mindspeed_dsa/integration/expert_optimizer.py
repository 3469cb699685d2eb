"""Optimizer state loaded by layouts that keep experts in an optimizer of their own, and by others.

With expert parallelism Megatron chains two optimizers, for what all data parallel ranks share and for the
experts; without, there is one. Tensors have the same names in checkpoints of both. The rest, counts of steps
and groups of parameters, is saved by optimizer, and what is loaded is the one merged into the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_dsa.context import Context, Megatron
from mindspeed_dsa.integration.optimizer import CHAINED, is_sharded
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch

ROW = Patch(
    f"{CHAINED}.load_state_dict",
    "wrap",
    "mindspeed_dsa.integration.expert_optimizer:load_across",
    "with expert parallelism experts have an optimizer of their own, and no layout loads the other's state",
    params=("state_dict",),
    priority=2,  # outside of features that take states apart, or count in all of them
)

_EXPERTS = "is_expert_parallel"
_IDENTITY = ("wd_mult", "lr_mult", _EXPERTS, "is_decoupled_lr")  # of releases before 0.14
_NOT_COMMON = ("state", "param_groups", "fp32_from_fp16_params")

State = Mapping[str, Any]


def load_across(original: Callable[..., Any], context: Context[Any]) -> Callable[..., Any]:
    """Decorate ``ChainedOptimizer.load_state_dict``."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = fitted(self.chained_optimizers, state_dict, context.megatron)
        return original(self, state, *args, **kwargs)

    return load_state_dict


def fitted(parts: Sequence[Any], state: Any, megatron: Megatron | None = None) -> Any:
    """State out of a distributed checkpoint, for as many optimizers as there are here.

    Args:
        parts: Megatron's optimizers, one or those of a chain.
        state: what ``dist_checkpointing.load`` has made of their ``sharded_state_dict``.
        megatron: whose.

    Returns:
        What they load: ``state`` itself if it was saved by as many optimizers.

    Raises:
        SettingsError: the checkpoint has no group of parameters like one of these.
    """
    if not isinstance(state, dict):
        return state
    numbered = {key: value for key, value in state.items() if isinstance(key, int)}
    named = {key: value for key, value in state.items() if key not in numbered}
    if not (numbered and named):
        return state
    optimizers = (megatron or Megatron())("core.optimizer.optimizer")
    keys = getattr(optimizers, "param_group_identifier_keys", _IDENTITY)
    chain = [numbered[key] for key in sorted(numbered)]
    if len(parts) == 1:
        return _filled(parts[0], named, chain, keys)
    return {
        number: _filled(part, numbered.get(number, {}), [named], keys) for number, part in enumerate(parts)
    }


def _filled(part: Any, own: State, saved: Sequence[State], keys: Sequence[str]) -> dict[str, Any]:
    """State of one optimizer.

    Args:
        part: the optimizer.
        own: what has been read for it: tensors, and which parameters its groups have.
        saved: the rest, of each optimizer that was saved.
        keys: what tells groups of parameters apart.
    """
    common = {name: value for name, value in saved[0].items() if name not in _NOT_COMMON}
    state = {**common, **own}
    inner = [_inner(each) for each in saved]
    groups = [group for each in inner for group in each["param_groups"]]
    wanted = part.optimizer.param_groups
    read = _inner(own).get("param_groups") or [{} for _ in wanted]
    steps = next((group["step"] for group in groups if group.get("step") is not None), None)
    filled: dict[str, Any] = {"param_groups": []}
    for here, parameters in zip(wanted, read, strict=True):
        group = {**_like(here, groups, keys), **parameters}
        if _EXPERTS in here:
            group[_EXPERTS] = here[_EXPERTS]
        if steps is not None:
            group["step"] = steps
        filled["param_groups"].append(group)
    if not is_sharded(part):  # the distributed optimizer has its parameters' state elsewhere
        filled["state"] = dict(_inner(own).get("state", {}))
        states = [each.get("state", {}) for each in inner]
        count = next((each["common_step"] for each in states if "common_step" in each), None)
        if count is not None:
            filled["state"]["common_step"] = count
    if "optimizer" not in saved[0]:
        return {**state, **filled}
    if hasattr(part, "fp32_from_float16_groups"):
        state.setdefault("fp32_from_fp16_params", [[] for _ in part.fp32_from_float16_groups])
    return {**state, "optimizer": {**_inner(saved[0]), **filled}}


def _inner(state: State) -> State:
    """What the optimizer of torch has saved, which mixed precision wraps."""
    inner: State = state.get("optimizer", state)
    return inner


def _like(here: State, groups: Sequence[State], keys: Sequence[str]) -> State:
    """The saved group with the same multipliers; that of experts for experts where there are two."""

    def identity(group: State) -> dict[str, Any]:
        # Some jobs write ``pre_wd_mult`` for ``wd_mult``, which Megatron reads as well.
        return {key: group.get(key, group.get(f"pre_{key}")) for key in keys if key != _EXPERTS}

    found = [group for group in groups if identity(group) == identity(here)]
    if not found:
        there = "; ".join(sorted({str(identity(group)) for group in groups}))
        raise SettingsError(
            f"mindspeed_dsa: the optimizer has a group of parameters with {identity(here)}, and the "
            f"checkpoint only {there or 'none'}: other parameters were trained there, or with other "
            "multipliers; load it with the flags that it was saved with, or add --no-load-optim to load "
            "the weights alone"
        )
    return max(found, key=lambda group: group.get(_EXPERTS) == here.get(_EXPERTS))
