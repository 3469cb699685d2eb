"""Optimizers whose indexers may have done more steps, or fewer, than all else.

After the warm-up the indexers' moments go on, and those of all else begin at step 0. Megatron saves one count
of steps for all parameters. So the difference, which is constant in a stage, is kept beside: it is added when
a state is loaded and taken off while one is saved. Optimizers that count in groups of parameters, like
Transformer Engine's, make a step with each group in two.

A checkpoint of Megatron's ``torch`` format numbers parameters, and each stage trains others. Where indexers
lie among them is saved beside the numbers; the distributed optimizer's buffers of that format are refused.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.stages.parameters import is_indexers, learns
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.megatron.optimizer import features_of, is_sharded, model_parameters
from mindspeed_dsa.patches.errors import SettingsError

ENTRY = "dsa_stage"
"""Key of what is saved beside an optimizer's state; absent if all is trained, in equally many steps."""
INDEXERS, OTHERS = "indexers", "all else"
BOTH = frozenset({INDEXERS, OTHERS})
_TRAINED = {"dense": frozenset({OTHERS}), "frozen": frozenset({OTHERS}), "warmup": frozenset({INDEXERS})}
_LAG = "_mindspeed_dsa_indexer_lag"
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_MASTERS = "fp32_from_fp16_params"

_sharding: ContextVar[bool] = ContextVar("_sharding", default=False)
"""True while the state for a distributed checkpoint is made."""

_Function = Callable[..., Any]


def trained_in(stage: str) -> frozenset[str]:
    """Return which of :data:`BOTH` a stage trains."""
    return _TRAINED.get(stage, BOTH)


def trained_by(entry: Mapping[str, Any]) -> frozenset[str]:
    """Return which of :data:`BOTH` the optimizer trained that saved an entry."""
    return frozenset(entry.get("trained", BOTH))


def lag_of(optimizer: Any) -> float:
    """Return how many steps indexers have done more than all else."""
    return float(vars(optimizer).get(_LAG, 0.0))


# -- steps -------------------------------------------------------------------------------------


def _indexer_entries(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield what torch's optimizer keeps for each parameter of an indexer, where it counts steps there."""
    inner = optimizer.optimizer
    for group, parameters in zip(inner.param_groups, model_parameters(optimizer), strict=True):
        for main, parameter in zip(group["params"], parameters, strict=True):
            if is_indexers(parameter) and "step" in inner.state.get(main, {}):
                yield inner.state[main]


@contextmanager
def _equal_steps(optimizer: Any) -> Iterator[None]:
    """Give indexers the count of all else meanwhile."""
    lag = lag_of(optimizer)
    counted = [(entry, entry["step"]) for entry in _indexer_entries(optimizer)] if lag else []
    for entry, step in counted:
        entry["step"] = step - lag
    try:
        yield
    finally:
        for entry, step in counted:
            entry["step"] = step


def step_by_kind(original: _Function) -> _Function:
    """Decorate ``step_with_ready_grads``: where groups count steps, those of indexers count apart."""

    def step_with_ready_grads(self: Any) -> Any:
        lag = lag_of(self)
        if not lag or not _counts_in_groups(self.optimizer):
            return original(self)
        inner: Any = self.optimizer
        groups, halves = inner.param_groups, []
        for group, parameters in zip(groups, model_parameters(self), strict=True):
            flags = [is_indexers(parameter) for parameter in parameters]
            for more, kind in ((0.0, False), (lag, True)):
                members = [main for main, flag in zip(group["params"], flags, strict=True) if flag == kind]
                if members:
                    halves.append((group, more, {**group, "params": members, "step": group["step"] + more}))
        inner.param_groups = [half for _, _, half in halves]
        try:
            return original(self)
        finally:
            inner.param_groups = groups
            for group, more, half in halves:
                group["step"] = half["step"] - more

    return step_with_ready_grads


def _counts_in_groups(inner: Any) -> bool:
    """Return whether it is an optimizer with a count in each group, and none beside the moments."""
    beside = any("step" in entry for entry in inner.state.values())
    return not beside and all("step" in group for group in inner.param_groups)


def warn_of_decay(original: _Function, context: Context[Options]) -> _Function:
    """Decorate constructors of optimizers: weight decay alone would shrink indexers without a loss."""

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        groups = getattr(optimizer, "param_groups", ())
        parameters = [each for group in groups for each in group["params"] if is_indexers(each)]
        if (getattr(config, "weight_decay", 0.0) or 0.0) > 0 and any(not learns(each) for each in parameters):
            context.log.warning(
                "indexers have no loss (--dsa-indexer-loss-coeff is 0), and --weight-decay %g shrinks them "
                "with every step; keep them as they are with --dsa-stage frozen",
                config.weight_decay,
                once=True,
            )
        original(self, optimizer, config, *args, **kwargs)

    return __init__


# -- what is saved -----------------------------------------------------------------------------


def _entry(optimizer: Any, stage: str, with_places: bool) -> dict[str, Any]:
    trained, lag = trained_in(stage), lag_of(optimizer)
    entry: dict[str, Any] = {}
    if trained != BOTH:
        entry["trained"] = sorted(trained)
    if lag:
        entry["lag"] = lag
    if with_places:
        groups = model_parameters(optimizer)
        places = [[at for at, each in enumerate(group) if is_indexers(each)] for group in groups]
        if any(places):
            entry["places"] = places
    return entry


def save_state(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``state_dict`` of an optimizer."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_stub(self) or _sharding.get():
            return original(self, *args, **kwargs)
        with _equal_steps(self) if is_sharded(self) else nullcontext():
            state = original(self, *args, **kwargs)
        entry = _entry(self, context.options.stage, with_places=not is_sharded(self))
        return {**state, ENTRY: entry} if entry else state

    return state_dict


def save_shards(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``sharded_state_dict`` of an optimizer."""

    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if _is_stub(self):
            return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)
        token = _sharding.set(True)
        try:
            with _equal_steps(self):
                state = original(self, model_sharded_state_dict, is_loading, *args, **kwargs)
        finally:
            _sharding.reset(token)
        entry = {} if is_loading else _entry(self, context.options.stage, with_places=False)
        return {**state, ENTRY: entry} if entry else state

    return sharded_state_dict


# -- what is loaded ----------------------------------------------------------------------------


def load_state(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``load_state_dict`` of an optimizer."""

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_stub(self) or _sharding.get():
            return original(self, state_dict, *args, **kwargs)
        if isinstance(state_dict, list):  # of a chain, before 0.14 the only one here is no chain
            state_dict = state_dict[0]
        entry = state_dict.get(ENTRY, {})
        state = {name: value for name, value in state_dict.items() if name != ENTRY}
        here, trained = trained_in(context.options.stage), trained_by(entry)
        if "new" in entry or trained != here:
            _check_keepers(self, context.options.stage)
        if "new" not in entry and trained != here:
            if is_sharded(self):
                raise SettingsError(buffers_refused(trained, here, "torch"))
            state, entry = _translated(self, state, entry, here)
            tell(context, trained, here)
        new = frozenset(entry.get("new", ()))
        counted_together = is_sharded(self) or "common_step" in _inner(state)["state"]
        if new and _MASTERS in state:
            state = {**state, _MASTERS: _masters(self, state[_MASTERS], new)}
        begun = _weights_of(self, new) if new and is_sharded(self) else {}
        result = original(self, state, *args, **kwargs)
        lag = float(entry.get("lag", 0.0))
        setattr(self, _LAG, lag)
        _begin_shards(self, begun)
        if lag and counted_together:
            for each in _indexer_entries(self):
                each["step"] = each["step"] + lag
        return result

    return load_state_dict


def _check_keepers(optimizer: Any, stage: str) -> None:
    """Refuse a state of another stage where weights or moments do not lie in the optimizer itself.

    Raises:
        SettingsError: they are a feature's, Megatron's offloading's, or shards of FSDP2.
    """
    keepers = [f"--{name}" for name in features_of(optimizer)]
    if type(optimizer.optimizer).__name__ == "HybridDeviceOptimizer":
        keepers.append("--optimizer-cpu-offload")
    groups = optimizer.optimizer.param_groups
    if any(type(each).__name__ == "DTensor" for group in groups for each in group["params"]):
        keepers.append("--use-torch-fsdp2")
    if keepers:
        raise SettingsError(
            "mindspeed_dsa: the checkpoint's optimizer state is that of another stage than --dsa-stage "
            f"{stage}, and does not go from stage to stage beside {', '.join(keepers)}; load the "
            f"weights alone with --no-load-optim, or without {' and '.join(keepers)}"
        )


def load_chain(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``ChainedOptimizer.load_state_dict``: the warm-up has no experts to optimize."""

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        parts = self.chained_optimizers
        saved = state_dict if isinstance(state_dict, list) else [state_dict]
        is_numbered = isinstance(state_dict, dict) and all(isinstance(key, int) for key in state_dict)
        trained = {trained_by(each.get(ENTRY, {})) for each in saved if isinstance(each, dict)}
        if is_numbered or len(saved) == len(parts) or trained == {trained_in(context.options.stage)}:
            return original(self, state_dict, *args, **kwargs)
        begun = {ENTRY: {"new": sorted(BOTH)}}
        states = [*saved[: len(parts)], *({**part.state_dict(), **begun} for part in parts[len(saved) :])]
        return original(self, states if len(parts) > 1 else states[0], *args, **kwargs)

    return load_state_dict


def buffers_refused(trained: frozenset[str], here: frozenset[str], format_: str) -> str:
    """Return why whole buffers of the distributed optimizer do not go from stage to stage."""
    return (
        f"mindspeed_dsa: the checkpoint has the optimizer's state of {words(trained)}, and this --dsa-stage "
        f"trains {words(here)}: the distributed optimizer's state is saved as {format_}, whole buffers, "
        "which lie otherwise here. Save it with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable "
        "(before 0.15: --ckpt-fully-parallel-save), or load the weights alone with --no-load-optim"
    )


def words(kinds: frozenset[str]) -> str:
    """Return which parameters are trained, in words."""
    return "all parameters" if kinds == BOTH else "indexers" if INDEXERS in kinds else "all but the indexers"


def tell(context: Context[Options], trained: frozenset[str], here: frozenset[str]) -> None:
    """Log what of an optimizer's state goes on, begins, and is dropped."""
    facts = {"goes on": trained & here, "begins at step 0": here - trained, "is dropped": trained - here}
    told = [f"that of {' and '.join(sorted(kinds))} {what}" for what, kinds in facts.items() if kinds]
    stage = context.options.stage
    context.log.info("--dsa-stage %s: of the optimizer's state %s", stage, ", ".join(told), once=True)


def _is_stub(optimizer: Any) -> bool:
    return getattr(optimizer, "optimizer", None) is None or bool(
        getattr(optimizer, "is_stub_optimizer", False)
    )


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of torch's optimizer, which mixed precision wraps."""
    inner: Mapping[str, Any] = state.get("optimizer", state)
    return inner


def _masters(optimizer: Any, saved: Any, new: frozenset[str]) -> list[list[Any]]:
    """Return master weights: as loaded, or made of the model's weights where there were none."""
    return [
        [
            parameter.detach().float() if _kind(parameter) in new else master
            for master, parameter in zip(masters, parameters, strict=True)
        ]
        for masters, parameters in zip(saved, optimizer.float16_groups, strict=True)
    ]


def _kind(parameter: Any) -> str:
    return INDEXERS if is_indexers(parameter) else OTHERS


def _weights_of(optimizer: Any, new: frozenset[str]) -> dict[Any, torch.Tensor]:
    """Return this rank's part, fp32, of the weights of parameters without a saved state.

    Those of fp32 parameters are copies: the distributed optimizer works on the model's own memory, which
    loading overwrites.
    """
    begun = {}
    for parameter in optimizer.model_param_group_index_map:
        if _kind(parameter) in new:
            place = optimizer._get_model_param_range_map(parameter)["param"]
            part = parameter.detach().view(-1)[place.start : place.end]
            begun[parameter] = part.clone() if part.dtype == torch.float32 else part
    return begun


@torch.no_grad()
def _begin_shards(optimizer: Any, begun: Mapping[Any, torch.Tensor]) -> None:
    """Give parameters without a saved state the one that they begin with, in the distributed optimizer.

    Args:
        optimizer: has loaded the state of the others.
        begun: weights by parameter, see :func:`_weights_of`.
    """
    for parameter, weights in begun.items():
        state = dict(optimizer._get_main_param_and_optimizer_states(parameter))
        state["param"] = weights.float()
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = torch.zeros_like(state[name])
        optimizer._set_main_param_and_optimizer_states(parameter, state)


# -- numbered parameters of the format torch ---------------------------------------------------


def _translated(
    optimizer: Any, state: Mapping[str, Any], entry: Mapping[str, Any], here: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Number the saved state of another stage as this one does.

    Args:
        optimizer: loads it.
        state: as saved.
        entry: what was saved beside it.
        here: what is trained here.

    Returns:
        The state, without what is not trained here or was not there, and its entry.

    Raises:
        SettingsError: the checkpoint has other parameters.
    """
    saved, trained = _inner(state), trained_by(entry)
    own = {name: value for name, value in optimizer.state_dict().items() if name != ENTRY}
    mine = _inner(own)
    there = _numbered(saved, entry)
    states: dict[Any, Any] = {}
    masters = [list(each) for each in own.get(_MASTERS, ())]
    groups = zip(mine["param_groups"], model_parameters(optimizer), strict=True)
    for index, (group, parameters) in enumerate(groups):
        saved_index, by_kind = there.get(_identity(group), (-1, {INDEXERS: [], OTHERS: []}))
        for kind in here & trained:
            places = [at for at, parameter in enumerate(parameters) if _kind(parameter) == kind]
            sources = by_kind[kind]
            if len(sources) != len(places):
                raise SettingsError(
                    f"mindspeed_dsa: the optimizer's state in the checkpoint is that of {len(sources)} "
                    f"parameters of {kind}, where this job has {len(places)}: another model or layout saved "
                    "it, or a session without the feature dsa-stage-checkpoints; load it with the flags that "
                    "it was saved with, or the weights alone with --no-load-optim"
                )
            for at, (source, number) in zip(places, sources, strict=True):
                if number in saved["state"]:
                    states[group["params"][at]] = saved["state"][number]
                if masters:
                    masters[index][at] = state[_MASTERS][saved_index][source]
    common, lag = counts_here(_count(saved, there, trained), trained, here, float(entry.get("lag", 0.0)))
    groups_here = [dict(group) for group in mine["param_groups"]]
    for group in groups_here:
        if any("step" in each for each in saved["param_groups"]):
            group["step"] = int(common)
    inner = {**mine, "state": states, "param_groups": groups_here}
    new_entry = {"lag": lag, "new": sorted(here - trained)}
    if "optimizer" not in own:
        return inner, new_entry
    rest = {name: value for name, value in state.items() if name not in ("optimizer", _MASTERS)}
    return {**own, **rest, "optimizer": inner, _MASTERS: masters}, new_entry


_Numbered = dict[tuple[Any, ...], tuple[int, dict[str, list[tuple[int, Any]]]]]


def _numbered(saved: Mapping[str, Any], entry: Mapping[str, Any]) -> _Numbered:
    """Return for each saved group its index, and by kind the places and numbers of its parameters."""
    groups, trained = saved["param_groups"], trained_by(entry)
    places = entry.get("places") or [[] for _ in groups]
    found: _Numbered = {}
    for index, (group, of_indexers) in enumerate(zip(groups, places, strict=True)):
        by_kind: dict[str, list[tuple[int, Any]]] = {INDEXERS: [], OTHERS: []}
        for at, number in enumerate(group["params"]):
            is_one = at in of_indexers or trained == {INDEXERS}
            by_kind[INDEXERS if is_one else OTHERS].append((at, number))
        found[_identity(group)] = index, by_kind
    return found


def _count(saved: Mapping[str, Any], numbered: _Numbered, trained: frozenset[str]) -> float:
    """Return the saved count of steps, of all else where that was trained."""
    for group in saved["param_groups"]:
        if group.get("step") is not None:
            return float(group["step"])
    kind = OTHERS if OTHERS in trained else INDEXERS
    numbers = [number for _, by_kind in numbered.values() for _, number in by_kind[kind]]
    steps = [saved["state"][each]["step"] for each in numbers if "step" in saved["state"].get(each, {})]
    return float(steps[0]) if steps else 0.0


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY)


def counts_here(
    count: float, trained: frozenset[str], here: frozenset[str], lag: float
) -> tuple[float, float]:
    """Return the count of steps to load, and the lag of the indexers in it.

    Args:
        count: saved, of all else where that was trained.
        trained: what was trained there.
        here: what is trained here.
        lag: of the indexers there.
    """
    done = {OTHERS: count, INDEXERS: count + lag}
    counts = {kind: done[kind] if kind in trained else 0.0 for kind in here}
    common = counts[OTHERS] if OTHERS in here else counts[INDEXERS]
    return common, counts[INDEXERS] - common if here == BOTH else 0.0
