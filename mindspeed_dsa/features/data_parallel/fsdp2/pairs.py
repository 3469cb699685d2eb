"""FSDP2 in Megatron's schedule of pairs: parts of layers, one microbatch's forward beside another's backward.

FSDP2 gathers and reduces in hooks of modules' calls, and such a schedule calls parts of layers. So it says
which units it is about to run, in one direction or both, and for them gathers, drops and reductions are done
here; units that are called as modules keep their hooks. Two more things differ from a backward pass in one
piece. The end of a graph is not the end of a backward pass: FSDP2 would drop all weights there, those of the
forward beside it included. And a unit's gradients are complete when the last of its weights' gradients has
been computed, which may be long after its weights have gone: it needs the layer's input and the gradient of
its output, and not the weight. What is computed later is reduced to its owners like any other gradient::

    forward.begin_forward(); backward.begin_backward()    # models, or chunks of one
    with beside(one.forward, another.backward):           # units; None where a direction runs alone
        ...                                               # parts of both
    another.backward.finish()                             # any time later, in the same order on all ranks
    backward.end_backward()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.data_parallel.fsdp2 import checks
from mindspeed_dsa.megatron.gathered_weights import hold
from mindspeed_dsa.megatron.split_layers import transformer_layer
from mindspeed_dsa.parallel import saved_tensors
from mindspeed_dsa.parallel.weight_gradients import (
    DeferredGradient,
    Queued,
    QueuedGradient,
    also_queued,
    are_queued,
    defer_gradients,
)
from mindspeed_dsa.patches.errors import SettingsError

# -- Megatron's schedule of pairs -------------------------------------------------------------------

_PARTS = "_mindspeed_dsa_fsdp2_parts"
_TAKEN_APART = ("TransformerBlock", "MoELayer", "MultiTokenPredictionBlock", "MultiTokenPredictionLayer")
"""Megatron's modules that schedule plans take things from, and never call."""


def follow(root: nn.Module, units: Collection[nn.Module], megatron: Megatron) -> None:
    """Have schedule plans of the model in ``root`` find what they gather.

    Weight gradients of attention and of dense MLPs wait for the end of a pair; those of a shared expert are
    what the combine is hidden behind in backward.

    Raises:
        SettingsError: a unit would never gather.
    """
    for module in units:
        for name in (each.__name__ for each in type(module).__mro__ if each.__name__ in _TAKEN_APART):
            raise SettingsError(
                f"fsdp2: a schedule of pairs never calls {name}, whose weights would not be gathered; drop "
                "it from sub_modules_to_wrap in --fsdp2-config-path, or omit --moe-fb-overlap "
                "(--overlap-moe-expert-parallel-comm)"
            )
    layers = megatron("core.transformer.transformer_layer").TransformerLayer
    moe = megatron("core.transformer.moe.moe_layer").MoELayer
    by_layer = {
        unit: Unit(
            unit, [part for each in unit.modules() if isinstance(each, moe) for part in each.modules()]
        )
        for unit in units
        if isinstance(unit, layers)
    }
    model = Model(root, by_layer.values())
    for each in root.modules():
        if (unit := by_layer.get(transformer_layer(each))) is not None:
            setattr(each, _PARTS, unit)
            hold(each, partial(_alone, ref(each)))
        elif hasattr(each, "build_schedule_plan"):
            setattr(each, _PARTS, model)


def run_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerLayerSchedulePlan.run``."""

    def run(
        f_layer: Any,
        b_layer: Any,
        f_input: Any = None,
        b_grad: Any = None,
        is_last_layer_in_bwd: bool = False,
    ) -> tuple[Any, Any]:
        forward, backward = (
            None if plan is None else getattr(plan.layer, _PARTS, None) for plan in (f_layer, b_layer)
        )
        with beside(forward, backward):
            result: tuple[Any, Any] = original(f_layer, b_layer, f_input, b_grad, is_last_layer_in_bwd)
        if backward is not None and not is_last_layer_in_bwd:
            backward.finish()
        return result

    return run


def run_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerModelChunkSchedulePlan.run``."""

    def run(
        f_schedule_plan: Any,
        b_schedule_plan: Any,
        b_grad: Any = None,
        pre_forward: Any = None,
        pre_backward: Any = None,
        post_forward: Any = None,
        post_backward: Any = None,
    ) -> Any:
        forward, backward = (
            None if plan is None else getattr(plan.state.model, _PARTS, None)
            for plan in (f_schedule_plan, b_schedule_plan)
        )

        def send_and_finish(*args: Any) -> None:
            post_backward(*args)
            if backward is not None:
                backward.finish()  # the first layer's, while its input's gradient is on its way

        if forward is not None:
            forward.begin_forward()
        if backward is not None:
            backward.begin_backward()
        output = original(
            f_schedule_plan,
            b_schedule_plan,
            b_grad,
            pre_forward,
            pre_backward,
            post_forward,
            None if post_backward is None else send_and_finish,
        )
        if backward is not None:
            backward.end_backward()
        return output

    return run


# -- units and models -------------------------------------------------------------------------------


class Unit:
    """A unit that a schedule runs in parts.

    Args:
        module: ``FSDPModule``.
        at_once: modules inside it whose weights' gradients are computed in backward.
    """

    def __init__(self, module: Any, at_once: Iterable[Any] = ()) -> None:
        self.module, self.late = module, Late(module, at_once)
        self._state = module._get_fsdp_state()

    def gather(self) -> None:
        """Return when the weights are there."""
        _gather(self.module)

    def ahead(self, direction: TrainingState) -> list[Any]:
        """Return the states of the units that run next, whose gathers are issued while this one computes."""
        return [state for state in _ahead(self._state, direction) if state is not self._state]

    def drop(self, direction: TrainingState, kept: Iterable[Any]) -> None:
        """Free the weights, as is usual after that direction, unless one of ``kept`` is this unit."""
        if self._state in kept:
            return
        for group in groups_of(self.module):
            if group.is_unsharded:
                with group.use_training_state(direction):
                    group.reshard()

    def finish(self) -> None:
        """Compute what backward has left uncomputed, and start to reduce."""
        self.late.run()


@contextlib.contextmanager
def beside(forward: Unit | None, backward: Unit | None) -> Iterator[None]:
    """Surround all parts of a forward and of a backward that run together; both may be of one unit.

    Every rank calls it with units at the same place.
    """
    running = [
        (unit, direction)
        for unit, direction in ((backward, TrainingState.PRE_BACKWARD), (forward, TrainingState.FORWARD))
        if unit is not None
    ]
    for unit, _ in running:
        unit.gather()
    next_ones = [(state, direction) for unit, direction in running for state in unit.ahead(direction)]
    for state, direction in next_ones:
        _issue(state, direction)
    with contextlib.nullcontext() if forward is None else forward.late.deferred():
        yield
    next_states = [state for state, _ in next_ones]
    for unit, direction in running:
        unit.drop(direction, next_states)


class Model:
    """A model, or one chunk of it, whose units a schedule runs in parts.

    Args:
        root: the outermost ``FSDPModule``.
        units: those that are run in parts.

    Raises:
        SettingsError: FSDP2's states are not those that this was written for.
    """

    def __init__(self, root: Any, units: Iterable[Unit]) -> None:
        self._root, self._units = root, list(units)
        self.in_backward = False
        root_state = root._get_fsdp_state()
        root_state._lazy_init()
        self._states: list[Any] = root_state._state_ctx.all_states
        checks.require_overrides(_State)
        checks.require_names(root_state._state_ctx, ("post_backward_final_callback_queued",))
        for state in self._states:
            checks.require_names(state, ("_training_state",))
            state.__class__ = _State
            state.model = self

    def begin_forward(self) -> None:
        """Gather what is no unit's, and issue the first gathers."""
        state = self._root._get_fsdp_state()
        if state._state_ctx.iter_forward_root is None:
            state._root_pre_forward(self._root, (), {})  # gathers come after the optimizer's step
            state._state_ctx.iter_forward_root = None  # each unit is called by itself
        self._begin(TrainingState.FORWARD)

    def begin_backward(self) -> None:
        """Begin a backward in the same way; its graphs end where :meth:`end_backward` is called."""
        self.in_backward = True
        self._begin(TrainingState.PRE_BACKWARD)

    def _begin(self, direction: TrainingState) -> None:
        _gather(self._root)
        state = self._root._get_fsdp_state()
        for each in _ahead(state, direction):
            if each is not state:
                _issue(each, direction)

    def graph_ends(self) -> None:
        """Note that one of a backward's graphs has been run: units called in it may be called again."""
        for state in self._states:
            state._training_state = TrainingState.IDLE
            for group in state._fsdp_param_groups:
                group._training_state = TrainingState.IDLE
        self._states[0]._state_ctx.post_backward_final_callback_queued = False

    def finish(self) -> None:
        """:meth:`Unit.finish` of all units that have left gradients uncomputed."""
        for unit in self._units:
            if len(unit.late):
                unit.finish()

    def end_backward(self) -> None:
        """Finish, drop all weights, and return when this rank's pieces of all sums are in its gradients."""
        self.finish()
        self.in_backward = False
        self._root._get_fsdp_state()._root_post_backward_final_callback()

    def drop_gradients(self) -> None:
        """Forget those of a step that failed."""
        self.in_backward = False
        for unit in self._units:
            unit.late.drop()
        # FSDP2 keeps those that it has not reduced yet, and would add them to the next step's.
        for state in self._states:
            for group in state._fsdp_param_groups:
                for each in group.fsdp_params:
                    each.unsharded_accumulated_grad = None
                    if hasattr(each, "_unsharded_param"):
                        each._unsharded_param.grad = None


class _State(FSDPState):
    """State of a unit of such a model, run in parts or called as a module."""

    model: Model

    def _root_post_backward_final_callback(self) -> None:
        if self.model.in_backward:
            self.model.graph_ends()
        else:
            super()._root_post_backward_final_callback()

    def _reset_iter_state(self) -> None:
        self.model.drop_gradients()
        super()._reset_iter_state()


@contextlib.contextmanager
def gathered(unit: ref[Any]) -> Iterator[None]:
    """Have a unit's weights for a part of its forward that runs by itself; free them as after a forward."""
    module = unit()
    _gather(module)
    yield
    for group in groups_of(module):
        if group.is_unsharded:
            with group.use_training_state(TrainingState.FORWARD):
                group.reshard()


def _alone(layer: ref[Any]) -> AbstractContextManager[None]:
    return beside(getattr(layer(), _PARTS), None)


def mark_gathered(unit: Any, *_: Any) -> None:
    """Mark gathered weights, whose memory is freed and filled again, for whoever moves saved tensors."""
    for group in groups_of(unit):
        for each in group.fsdp_params:
            saved_tensors.mark_freed(each._unsharded_param)


def _gather(unit: Any) -> None:
    for group in groups_of(unit):
        # In forward FSDP2 would keep the buffer of a gather until that of the next is full.
        with group.use_training_state(TrainingState.PRE_BACKWARD):
            group.unshard(group.unshard_async_op)
            group.wait_for_unshard()
    mark_gathered(unit)


def _ahead(state: Any, direction: TrainingState) -> list[Any]:
    forward = direction == TrainingState.FORWARD
    return list(state._states_to_forward_prefetch if forward else state._states_to_backward_prefetch)


def _issue(state: Any, direction: TrainingState) -> None:
    name = "forward" if direction == TrainingState.FORWARD else "backward"
    for group in state._fsdp_param_groups:
        FSDPParamGroup._prefetch_unshard(group, name)


def groups_of(unit: Any) -> list[Any]:
    """Return the ``FSDPParamGroup``s of a unit."""
    groups: list[Any] = unit._get_fsdp_state()._fsdp_param_groups
    return groups


# -- gradients that backward leaves uncomputed ------------------------------------------------------


class Late:
    """Gradients of one unit's weights that backward leaves uncomputed.

    Args:
        unit: ``FSDPModule``.
        without: modules inside it whose weights take their gradients as ever.
    """

    def __init__(self, unit: Any, without: Iterable[Any] = ()) -> None:
        self._groups = groups_of(unit)
        apart = set(without)
        weights = [each for group in self._groups for each in group.fsdp_params]
        self._weights = [each for each in weights if each._module_info.module not in apart]
        self._queue: list[Queued] = []

    def deferred(self) -> AbstractContextManager[Collection[DeferredGradient]]:
        """Have functions that are called in the block leave them here; the weights are gathered.

        A schedule that collects gradients gets all of them, as of units that are called.
        """
        if are_queued():
            return also_queued(_matrices(self._groups))
        weights = [each.unsharded_param for each in self._weights]
        return defer_gradients(weights, lambda weight: QueuedGradient(weight, self._queue))

    def __len__(self) -> int:
        """Return how many gradients are to be computed."""
        return len(self._queue)

    @torch.no_grad()
    def run(self) -> None:
        """Compute them, and start to reduce all gradients that the unit has.

        Its weights may be in use for another microbatch meanwhile.
        """
        while self._queue:
            weight, computed = _computed(self._queue.pop(0))  # operands go as soon as each is done
            if computed is not None:
                weight.grad = computed if weight.grad is None else weight.grad + computed
        for group in self._groups:
            _reduce(group)

    def drop(self) -> None:
        """Forget those of a step that failed."""
        self._queue.clear()


def _computed(queued: Queued) -> tuple[Tensor, Tensor | None]:
    return queued.weight, queued.gradient()


def _reduce(group: Any) -> None:
    """Do what FSDP2 does at the end of a unit's backward, with weights and state left as they are."""
    state, reshards = group._training_state, group.reshard_after_backward
    group.reshard_after_backward = False
    try:
        group.post_backward()
    finally:
        group._training_state, group.reshard_after_backward = state, reshards


# -- gradients that a schedule of whole chunks computes later --------------------------------------


def leave_gradients(unit: Any) -> None:
    """Have a unit's calls leave its weights' gradients where a schedule collects them, if one does.

    A gradient needs the input of its layer and the gradient of the output: the weights are dropped as usual.
    """
    entered: list[AbstractContextManager[Any]] = []

    def enter(module: Any, *_: Any) -> None:
        queued = also_queued(_matrices(groups_of(module)))
        queued.__enter__()
        entered.append(queued)

    def leave(*_: Any) -> None:
        if entered:  # none if another hook has raised before
            entered.pop().__exit__(None, None, None)

    unit.register_forward_pre_hook(enter)
    unit.register_forward_hook(leave, always_call=True)


def _matrices(groups: Iterable[Any]) -> Iterator[Tensor]:
    weights = (each.unsharded_param for group in groups for each in group.fsdp_params)
    return (weight for weight in weights if weight.dim() > 1)


def reduce_left(root: ref[Any]) -> None:
    """Reduce gradients that the weights of a model have got after its backward, as at the end of one."""
    module: Any = root()
    module._get_fsdp_state()._root_post_backward_final_callback()
