"""Hooks into the life of Megatron's optimizers, for features that keep optimizer state elsewhere.

A feature that moves weights or moments subclasses :class:`OptimizerState` and overrides the methods that it
needs. Its declaration lists these methods with :func:`rows`, which returns the patches. Imports neither torch
nor Megatron.

Order of events in a step: ``prepare_grads`` copies and checks the gradients, then they are clipped. Then
``step_with_ready_grads`` updates the master weights and copies them to the model's weights; with the
distributed optimizer it also starts the all-gather of the weights. A skipped step ends after
``prepare_grads``.

If Megatron's own step fails in the middle, some parameters are updated and others are not, and the next step
continues from there. A feature whose state is stored elsewhere cannot always continue from a partial update.
Its optimizer then refuses to step and to be saved until all of its state has been loaded again
(:class:`.StepIntegrity`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_dsa.feature import Context
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.patches.spec import Patch

if TYPE_CHECKING:
    from mindspeed_dsa.optimizers.integrity import StepIntegrity

_OPTIMIZER = "megatron.core.optimizer.optimizer"
FLOAT16 = f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params"
FLOAT32 = f"{_OPTIMIZER}:FP32Optimizer"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
MIXED = f"{_OPTIMIZER}:MixedPrecisionOptimizer"
"""Base of :data:`FLOAT16` and :data:`DISTRIBUTED`."""
CHAINED = f"{_OPTIMIZER}:ChainedOptimizer"

_Function = Callable[..., Any]
_ATTRIBUTE = "_mindspeed_dsa_states"


class _Site(NamedTuple):
    """Patched method of Megatron's optimizers: classes that define it, and parameters that we read."""

    method: str
    classes: tuple[str, ...]
    params: tuple[str, ...] = ()


_SITES = {
    "built": _Site("__init__", (FLOAT16, DISTRIBUTED, FLOAT32), ("optimizer", "config")),
    "before_grads": _Site("prepare_grads", (MIXED, FLOAT32, CHAINED)),
    "step": _Site("step_with_ready_grads", (MIXED, FLOAT32)),
    "master_to_model": _Site("_copy_main_params_to_model_params", (FLOAT16, DISTRIBUTED)),
    "model_to_master": _Site("_copy_model_params_to_main_params", (FLOAT16, DISTRIBUTED)),
    "state_dict": _Site("state_dict", (FLOAT16, FLOAT32, DISTRIBUTED)),
    "load_state_dict": _Site("load_state_dict", (FLOAT16, FLOAT32, DISTRIBUTED), ("state_dict",)),
    "get_parameter": _Site("_get_main_param_and_optimizer_states", (DISTRIBUTED,), ("model_param",)),
    "set_parameter": _Site(
        "_set_main_param_and_optimizer_states", (DISTRIBUTED,), ("model_param", "tensors")
    ),
    "load_parameters": _Site("load_parameter_state_from_dp_zero_legacy", (DISTRIBUTED,), ("state_dict",)),
}


@dataclass(frozen=True)
class Hook:
    """Method of :class:`OptimizerState` that a feature overrides.

    Attributes:
        name: name of the method.
        why: one-sentence reason for the patches.
        classes: Megatron's optimizer classes to patch; default: all that define the patched method.
    """

    name: str
    why: str
    classes: tuple[str, ...] = ()


def rows(implementation: str, *hooks: Hook) -> tuple[Patch, ...]:
    """Return the patches for the methods that a feature overrides.

    Args:
        implementation: feature's subclass of :class:`OptimizerState`, ``"package.module:Class"``.
        hooks: overridden methods.
    """
    return tuple(
        Patch(
            f"{optimizer}.{_SITES[hook.name].method}",
            "wrap",
            f"{implementation}.wrap_{hook.name}",
            hook.why,
            params=_SITES[hook.name].params,
        )
        for hook in hooks
        for optimizer in hook.classes or _SITES[hook.name].classes
    )


class Place(NamedTuple):
    """Location of a parameter in an inner optimizer.

    Attributes:
        group: index of the parameter's group in ``param_groups``.
        at: index of the parameter in the group.
        main: inner optimizer's parameter (the fp32 master weight, if there is one), the key of its state.
    """

    group: int
    at: int
    main: Any


class OptimizerState:
    """State that a feature keeps for one of Megatron's optimizers.

    Methods get ``call``, which runs the rest of the patched method including Megatron's own code, and return
    its result. :attr:`integrity` is required before a step and before saving, and is restored when all state
    has been loaded.

    Attributes:
        integrity: record of whether the last step updated all parameters.
    """

    integrity: StepIntegrity

    @classmethod
    def check(cls, args: Any, options: Any) -> Iterable[str]:
        """Yield problems of a job's arguments or of the optimizer's configuration."""
        return ()

    @classmethod
    def constructing(cls, context: Context[Any]) -> AbstractContextManager[Any]:
        """Return a context around the constructor of Megatron's optimizer."""
        return nullcontext()

    @classmethod
    def built(cls, optimizer: Any, context: Context[Any]) -> OptimizerState | None:
        """Return the feature's state for a newly built optimizer with parameters; ``None`` for no state."""
        raise NotImplementedError

    def before_grads(self) -> None:
        """Called when gradients are complete, before ``prepare_grads``."""

    def after_skip(self) -> None:
        """Called if ``prepare_grads`` decides to skip the step, for example because of a NaN gradient."""

    def step(self, call: Callable[[], bool]) -> bool:
        """Update the master weights; ``call`` runs Megatron's own step."""
        return call()

    def master_to_model(self, call: Callable[[], None]) -> None:
        """Copy the master weights to the model's weights; ``call`` runs Megatron's own copy."""
        call()

    def model_to_master(self, call: Callable[[], None], from_state_dict: bool) -> None:
        """Set the master weights from the model's weights, or from a model state dict, with ``call``."""
        call()

    def state_dict(self, call: Callable[[], Any]) -> Any:
        """Return the state to save. The distributed optimizer saves per-parameter state separately."""
        return call()

    def load_state_dict(self, call: Callable[[], Any]) -> Any:
        """Load a saved result of :meth:`state_dict`; ``call`` runs Megatron's own loading."""
        return call()

    def get_parameter(self, place: Place, call: Callable[[], Any]) -> Any:
        """Return the master weight and moments of one parameter, for saving."""
        return call()

    def set_parameter(self, place: Place, call: Callable[[], None]) -> None:
        """Load the master weight and moments of one parameter."""
        call()

    def load_parameters(self, call: Callable[[], None]) -> None:
        """Load master weights and moments of all parameters from a legacy checkpoint."""
        call()

    # -- decorators, one per method ---------------------------------------------------------

    @classmethod
    def wrap_built(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``__init__`` to store the result of :meth:`built`."""

        def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            # Checked first on the optimizer's configuration; DDP's is known only after construction.
            require(context, cls.check, config)
            with cls.constructing(context):
                original(self, optimizer, config, *args, **kwargs)
            if hasattr(self, "ddp_config"):
                require(context, cls.check, config, self.ddp_config)
            # A stub optimizer is a rank's optimizer without parameters.
            if not self.is_stub_optimizer and (state := cls.built(self, context)) is not None:
                # Several features may keep state for one optimizer.
                vars(self).setdefault(_ATTRIBUTE, {})[context.feature] = state

        return __init__

    @classmethod
    def wrap_before_grads(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``prepare_grads``, also of chains, to call :meth:`before_grads` and :meth:`after_skip`."""

        def prepare_grads(self: Any) -> bool:
            parts = [state_of(part, context.feature) for part in getattr(self, "chained_optimizers", [self])]
            states = [state for state in parts if state is not None]
            for state in states:
                state.integrity.require()  # check all parts before the first one steps
            for state in states:
                state.before_grads()
            skipped = bool(original(self))
            if skipped:
                for state in states:
                    state.after_skip()
            return skipped

        return prepare_grads

    @classmethod
    def wrap_step(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``step_with_ready_grads`` to call :meth:`step`."""

        def step_with_ready_grads(self: Any) -> bool:
            state = state_of(self, context.feature)
            if state is None:
                return bool(original(self))
            state.integrity.require()
            return state.step(lambda: bool(original(self)))

        return step_with_ready_grads

    @classmethod
    def wrap_master_to_model(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``_copy_main_params_to_model_params`` to call :meth:`master_to_model`."""

        def _copy_main_params_to_model_params(self: Any) -> None:
            state = state_of(self, context.feature)
            if state is None:
                original(self)
            else:
                state.master_to_model(lambda: original(self))

        return _copy_main_params_to_model_params

    @classmethod
    def wrap_model_to_master(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``_copy_model_params_to_main_params`` to call :meth:`model_to_master`."""

        def _copy_model_params_to_main_params(self: Any, *args: Any, **kwargs: Any) -> None:
            state = state_of(self, context.feature)
            if state is None:
                original(self, *args, **kwargs)
                return
            # The only argument is a model's state dict, supported since 0.14.
            from_state_dict = any(value is not None for value in (*args, *kwargs.values()))
            state.model_to_master(lambda: original(self, *args, **kwargs), from_state_dict)

        return _copy_model_params_to_main_params

    @classmethod
    def wrap_state_dict(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``state_dict`` to call :meth:`state_dict`."""

        def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            state = state_of(self, context.feature)
            if state is None:
                return original(self, *args, **kwargs)
            state.integrity.require()
            return state.state_dict(lambda: original(self, *args, **kwargs))

        return state_dict

    @classmethod
    def wrap_load_state_dict(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``load_state_dict`` to call :meth:`load_state_dict`."""

        def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            state = state_of(self, context.feature)
            if state is None:
                return original(self, state_dict, *args, **kwargs)
            result = state.load_state_dict(lambda: original(self, state_dict, *args, **kwargs))
            if not is_sharded(self):  # the distributed optimizer loads per-parameter state separately
                state.integrity.all_loaded()
            return result

        return load_state_dict

    @classmethod
    def wrap_get_parameter(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``_get_main_param_and_optimizer_states`` to call :meth:`get_parameter`."""

        def _get_main_param_and_optimizer_states(self: Any, model_param: Any) -> Any:
            state = state_of(self, context.feature)
            if state is None:
                return original(self, model_param)
            state.integrity.require()
            return state.get_parameter(_place(self, model_param), lambda: original(self, model_param))

        return _get_main_param_and_optimizer_states

    @classmethod
    def wrap_set_parameter(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``_set_main_param_and_optimizer_states`` to call :meth:`set_parameter`."""

        def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
            state = state_of(self, context.feature)
            if state is None:
                original(self, model_param, tensors)
                return
            place = _place(self, model_param)
            state.set_parameter(place, lambda: original(self, model_param, tensors))
            state.integrity.loaded(place.main)

        return _set_main_param_and_optimizer_states

    @classmethod
    def wrap_load_parameters(cls, original: _Function, context: Context[Any]) -> _Function:
        """Decorate ``load_parameter_state_from_dp_zero_legacy`` to call :meth:`load_parameters`."""

        def load_parameter_state_from_dp_zero_legacy(self: Any, state_dict: Any) -> None:
            state = state_of(self, context.feature)
            if state is None:
                original(self, state_dict)
                return
            state.load_parameters(lambda: original(self, state_dict))
            state.integrity.all_loaded()

        return load_parameter_state_from_dp_zero_legacy


def state_of(optimizer: Any, feature: str) -> OptimizerState | None:
    """Return a feature's state of an optimizer, or ``None`` if it was built without the feature."""
    state: OptimizerState | None = vars(optimizer).get(_ATTRIBUTE, {}).get(feature)
    return state


def is_sharded(optimizer: Any) -> bool:
    """Return whether an optimizer is Megatron's distributed optimizer."""
    return hasattr(optimizer, "shard_fp32_from_float16_groups")


def model_parameters(optimizer: Any) -> list[list[Any]]:
    """Return the model's parameters, grouped and ordered like the optimizer's (possibly fp32) parameters.

    Args:
        optimizer: Megatron's optimizer. A distributed one has only the parameters that this rank holds a
            shard of.
    """
    groups: list[list[Any]] = [list(group["params"]) for group in optimizer.optimizer.param_groups]
    if is_sharded(optimizer):
        for parameter, (group, at) in optimizer.model_param_group_index_map.items():
            groups[group][at] = parameter
        return groups
    if not hasattr(optimizer, "float16_groups"):
        return groups
    parameters = []
    # A group mixes fp32 copies of 16-bit parameters with parameters that are fp32 themselves.
    places = zip(groups, optimizer.float16_groups, optimizer.fp32_from_fp32_groups, strict=True)
    for mains, halves, wholes in places:
        # `halves` are in the same order as the remaining main parameters.
        whole, rest = {id(parameter) for parameter in wholes}, iter(halves)
        parameters.append([main if id(main) in whole else next(rest) for main in mains])
    return parameters


def _place(optimizer: Any, model_param: Any) -> Place:
    group, at = optimizer.model_param_group_index_map[model_param]
    return Place(group, at, optimizer.optimizer.param_groups[group]["params"][at])
