"""Checkpoint loading between layouts with and without separate optimizers, for example for experts.

With expert parallelism Megatron chains two optimizers: one for parameters shared by all data parallel ranks,
one for the experts. Without expert parallelism there is one optimizer. A vocabulary that is divided among
context parallel ranks has one more. Checkpoints of all layouts use the same tensor names. Step counts and
param groups are saved per optimizer, and are converted here.

Megatron-LM's training loop also saves random generator states per data parallel rank with expert parallelism.
Imports neither torch nor Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.megatron.optimizer import CHAINED, is_sharded
from mindspeed_dsa.megatron.pipeline_chunks import is_v_shaped
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.megatron.across_layouts"

ROWS = (
    Patch(
        f"{CHAINED}.load_state_dict",
        "wrap",
        f"{_HERE}:load_across",
        "experts have an optimizer of their own with expert parallelism, and no layout loads the other's",
        params=("state_dict",),
        priority=2,  # outside of features that split the state, or count steps in all optimizers of the chain
    ),
    Patch(
        "megatron.training.checkpointing:_load_base_checkpoint",
        "wrap",
        f"{_HERE}:load_base_across",
        "generators are saved in another number with expert parallelism; what cannot be read has no message",
        params=("load_dir", "args", "rank0", "sharded_state_dict"),
        required=False,
    ),
)
"""Patches for every feature that allows a job to change its layout at a checkpoint."""

_VOCABULARY = 100
"""Key of the optimizer of a divided vocabulary in the state of a chain; the others have 0 and 1."""
_KEY = "_mindspeed_dsa_key"
_EXPERTS = "is_expert_parallel"
_IDENTITY = ("wd_mult", "lr_mult", _EXPERTS, "is_decoupled_lr")  # before 0.14, which exports the list
# Formats that store slices of gradient buffers. The slices depend on the layout.
_SLICES = ("dp_reshardable", "dp_zero_gather_scatter", "fully_sharded_bucket_space")
# Keys that are per parameter or per group, not common to all optimizers of a chain.
_NOT_COMMON = ("state", "param_groups", "fp32_from_fp16_params")

State = Mapping[str, Any]


def mark_vocabulary(optimizer: Any) -> None:
    """Declare an optimizer of a chain as the optimizer of a divided vocabulary."""
    setattr(optimizer, _KEY, _VOCABULARY)


def keys_of(parts: Sequence[Any]) -> list[int]:
    """Return the keys of the parts of a chain in its state."""
    return [getattr(part, _KEY, number) for number, part in enumerate(parts)]


def load_across(original: Callable[..., Any], context: Context[Any]) -> Callable[..., Any]:
    """Decorate ``ChainedOptimizer.load_state_dict``: convert state saved by another number of optimizers."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = fitted(self.chained_optimizers, state_dict, context.megatron)
        return original(self, state, *args, **kwargs)

    return load_state_dict


def fitted(parts: Sequence[Any], state: Any, megatron: Megatron | None = None) -> Any:
    """Convert optimizer state from a distributed checkpoint to this layout's number of optimizers.

    Args:
        parts: Megatron's optimizers, one or the parts of a chain.
        state: result of ``dist_checkpointing.load`` for the optimizers' ``sharded_state_dict``.
        megatron: session's Megatron.

    Returns:
        State for the optimizers to load; ``state`` itself if the checkpoint was saved by the same number of
            optimizers.

    Raises:
        SettingsError: the checkpoint has no param group that matches one of the optimizers' groups.
    """
    if not isinstance(state, dict):
        return state
    # A chain saves its parts under numbers, and a single optimizer saves its state under names. Both kinds of
    # keys are present only if the checkpoint was saved by the other kind.
    numbered = {key: value for key, value in state.items() if isinstance(key, int)}
    named = {key: value for key, value in state.items() if key not in numbered}
    optimizers = (megatron or Megatron())("core.optimizer.optimizer")
    keys = getattr(optimizers, "param_group_identifier_keys", _IDENTITY)
    # The others contain only tensors, which a part of this chain loads.
    saved = {key: numbered[key] for key in sorted(numbered) if _has_groups(numbered[key], keys)}
    wanted = keys_of(parts)
    if not numbered or (not named and saved.keys() == set(wanted)):
        return state
    if len(parts) == 1:
        return _filled(parts[0], named, list(saved.values()), keys)
    chain = [named] if named else list(saved.values())
    return {
        key: saved[key] if key in saved else _filled(part, numbered.get(key, {}), chain, keys)
        for key, part in zip(wanted, parts, strict=True)
    }


def _has_groups(state: State, keys: Sequence[str]) -> bool:
    """Return whether an optimizer's state contains saved param groups."""
    return any(key in group for group in _inner(state).get("param_groups", ()) for key in keys)


def _filled(part: Any, loaded: State, saved: Sequence[State], keys: Sequence[str]) -> dict[str, Any]:
    """Build the state of one optimizer from loaded tensors and the saved step counts and param groups.

    Args:
        part: optimizer.
        loaded: state loaded for this optimizer: its tensors, and the parameters of its groups.
        saved: state that all ranks share (step count, param groups), of each saved optimizer.
        keys: keys that identify a param group.
    """
    common = {name: value for name, value in saved[0].items() if name not in _NOT_COMMON}
    state = {**common, **loaded}
    inner = [_inner(optimizer_state) for optimizer_state in saved]
    groups = [group for optimizer_state in inner for group in optimizer_state["param_groups"]]
    wanted = part.optimizer.param_groups
    read = _inner(loaded).get("param_groups") or [{} for _ in wanted]
    steps = next((group["step"] for group in groups if group.get("step") is not None), None)
    filled: dict[str, Any] = {"param_groups": []}
    for here, parameters in zip(wanted, read, strict=True):
        group = {**_like(here, groups, keys), **parameters}
        # The saved group may be the other optimizer's, so keep this group's expert flag.
        if _EXPERTS in here:
            group[_EXPERTS] = here[_EXPERTS]
        if steps is not None:
            group["step"] = steps
        filled["param_groups"].append(group)
    if not is_sharded(part):  # the distributed optimizer stores per-parameter state separately
        filled["state"] = dict(_inner(loaded).get("state", {}))
        states = [optimizer_state.get("state", {}) for optimizer_state in inner]
        count = next((entry["common_step"] for entry in states if "common_step" in entry), None)
        if count is not None:
            filled["state"]["common_step"] = count
    if "optimizer" not in saved[0]:
        return {**state, **filled}
    if hasattr(part, "fp32_from_float16_groups"):
        # Megatron expects a list per group; the tensors themselves come from the sharded state.
        state.setdefault("fp32_from_fp16_params", [[] for _ in part.fp32_from_float16_groups])
    return {**state, "optimizer": {**_inner(saved[0]), **filled}}


def _inner(state: State) -> State:
    """Return the state of torch's optimizer, which mixed precision nests under ``optimizer``."""
    inner: State = state.get("optimizer", state)
    return inner


def _like(here: State, groups: Sequence[State], keys: Sequence[str]) -> State:
    """Find the saved param group with the same multipliers; prefer one with the same expert flag."""

    def identity(group: State) -> dict[str, Any]:
        # Some jobs write ``pre_wd_mult`` for ``wd_mult``, which Megatron reads as well.
        return {key: group.get(key, group.get(f"pre_{key}")) for key in keys if key != _EXPERTS}

    candidates = [group for group in groups if identity(group) == identity(here)]
    if not candidates:
        there = "; ".join(sorted({str(identity(group)) for group in groups}))
        raise SettingsError(
            f"mindspeed_dsa: the optimizer has a group of parameters with {identity(here)}, and the "
            f"checkpoint only {there or 'none'}: other parameters were trained there, or with other "
            "multipliers; load it with the flags that it was saved with, or add --no-load-optim to load "
            "the weights alone"
        )
    # True sorts after False.
    return max(candidates, key=lambda group: group.get(_EXPERTS) == here.get(_EXPERTS))


def load_base_across(original: Callable[..., Any], context: Context[Any]) -> Callable[..., Any]:
    """Decorate ``_load_base_checkpoint``: check the layout from the common state before tensors are read."""
    # Megatron loads a checkpoint in two calls: first the common state (rank0=True), then the tensors. `saved`
    # holds the facts from the first call for the second one.
    saved: dict[str, Any] = {}

    @functools.wraps(original)
    def _load_base_checkpoint(
        load_dir: Any,
        args: Any,
        rank0: bool = False,
        sharded_state_dict: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        there = saved.get("args")
        if not rank0 and sharded_state_dict and there is not None and _layout(there) != _layout(args):
            _check_format(saved, args)
            _check_generators(saved["folder"], args, sharded_state_dict, context)
        result = original(load_dir, args, rank0, sharded_state_dict, *rest, **kwargs)
        state, folder, release, *_ = result
        if rank0 and isinstance(state, dict) and not release:  # a release checkpoint contains only weights
            # Keep facts, not the state: in some formats it contains weights and moments.
            read = getattr(context.megatron("core.dist_checkpointing"), "load_content_metadata", None)
            facts = (read(preloaded_state_dict=state) if read else None) or {}  # available since 0.14
            saved.update(args=state.get("args"), folder=folder, facts=facts)
        elif not rank0:
            saved.clear()
        return result

    return _load_base_checkpoint


_V_SHAPED = "V-shaped"
_DIVIDED, _DIVIDES = "vocabulary over context", "cp_shard_vocabulary"


def _layout(args: Any) -> dict[str, int]:
    """Return the layout sizes that determine expert optimizers, buffer slices and generator states."""
    tensor = getattr(args, "tensor_model_parallel_size", None) or 1
    return {
        "tensor": tensor,
        "pipeline": getattr(args, "pipeline_model_parallel_size", None) or 1,
        "expert": getattr(args, "expert_model_parallel_size", None) or 1,
        "expert tensor": getattr(args, "expert_tensor_parallel_size", None) or tensor,
        "world": getattr(args, "world_size", None) or 1,
        _V_SHAPED: int(is_v_shaped(args)),
        _DIVIDED: getattr(args, "context_parallel_size", 1) if getattr(args, _DIVIDES, False) else 1,
    }


def _check_format(saved: State, args: Any) -> None:
    """Refuse optimizer state whose format, or whose tensor names, belong to another layout."""
    if args.finetune or args.no_load_optim:
        return
    there, here = _layout(saved["args"]), _layout(args)
    differ = [name for name in ("expert", "expert tensor", _V_SHAPED, _DIVIDED) if there[name] != here[name]]
    if not differ:
        return
    facts = saved["facts"]
    format_ = facts.get("distrib_optim_sharding_type")
    if args.use_distributed_optimizer and format_ in _SLICES:
        why = f"the distributed optimizer's state is saved as {format_}, slices of buffers"
        way = "save it with --dist-ckpt-optim-fully-reshardable (before 0.15: --ckpt-fully-parallel-save)"
    elif not facts.get("chained_optim_avoid_prefix") and (there["expert"] > 1) != (here["expert"] > 1):
        why = "a Megatron before 0.14 has saved it, which names the optimizer's state by optimizer"
        way = "resume it with the expert parallel size that it has"
    else:
        return
    words = {_V_SHAPED: "chunks in the shape of a V"}
    sizes = ", ".join(
        f"{words.get(name, f'{name} parallel')} {there[name]} there and {here[name]} here" for name in differ
    )
    raise SettingsError(
        f"mindspeed_dsa: checkpoint {saved['folder']} has an optimizer's state that this layout "
        f"cannot read ({sizes}): {why}; {way}, or add --no-load-optim to load the weights alone"
    )


def _check_generators(folder: Any, args: Any, wanted: dict[str, Any], context: Context[Any]) -> None:
    """Skip loading generator states that were saved for another layout; the generators start fresh."""
    generators: Any = wanted.get("rng_state")
    if not hasattr(generators, "unique_key"):
        return
    serialization = context.megatron("core.dist_checkpointing.serialization")
    if generators.unique_key not in serialization.load_sharded_metadata(str(folder)):
        del wanted["rng_state"]
        args.no_load_rng = True
        context.log.warning(
            "checkpoint %s has the states of random number generators for another layout; they begin anew",
            folder,
        )
