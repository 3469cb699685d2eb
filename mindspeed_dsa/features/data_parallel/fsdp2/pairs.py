"""FSDP2 in Megatron's paired schedule, which interleaves one microbatch's forward with another's backward.

FSDP2 all-gathers weights and reduces gradients in hooks of module calls, but this schedule calls parts of
layers (attention, MLP and so on) separately. So the schedule announces the FSDP units that it is about to
run, and this module gathers and frees their weights and reduces their gradients. Units that are called as
modules keep FSDP2's hooks. Two more things differ from an ordinary backward pass:

* The end of one autograd graph is not the end of the backward pass. FSDP2 would free all weights there,
  including weights that the interleaved forward is using.
* A unit's gradients are complete when its last weight gradient is computed. This may be long after its
  weights were freed: a weight gradient needs the layer's input and the output's gradient, but not the weight.
  Gradients that are computed later are reduced like any other gradient.

Use::

    forward.begin_forward(); backward.begin_backward()    # models, or chunks of one
    with beside(one.forward, another.backward):           # units; None without that direction
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
"""Megatron's modules whose parts a schedule plan calls, but which it never calls as modules."""


def follow(root: nn.Module, units: Collection[nn.Module], megatron: Megatron) -> None:
    """Attach :class:`Model` and :class:`Unit` objects to the model and its layers, for the schedule plans.

    Raises:
        SettingsError: a unit would never be gathered.
    """
    for module in units:
        for name in (base.__name__ for base in type(module).__mro__ if base.__name__ in _TAKEN_APART):
            raise SettingsError(
                f"fsdp2: a schedule of pairs never calls {name}, whose weights would not be gathered; drop "
                "it from sub_modules_to_wrap in --fsdp2-config-path, or omit --moe-fb-overlap "
                "(--overlap-moe-expert-parallel-comm)"
            )
    layers = megatron("core.transformer.transformer_layer").TransformerLayer
    moe = megatron("core.transformer.moe.moe_layer").MoELayer
    # Weight gradients of attention and dense MLPs wait for the end of a pair. Shared experts compute theirs
    # at once, because in backward they hide the combine.
    by_layer = {
        unit: Unit(
            unit, [part for child in unit.modules() if isinstance(child, moe) for part in child.modules()]
        )
        for unit in units
        if isinstance(unit, layers)
    }
    model = Model(root, by_layer.values())
    for child in root.modules():
        if (unit := by_layer.get(transformer_layer(child))) is not None:
            setattr(child, _PARTS, unit)
            hold(child, partial(_alone, ref(child)))
        elif hasattr(child, "build_schedule_plan"):
            setattr(child, _PARTS, model)


def run_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerLayerSchedulePlan.run`` to gather and afterwards free both layers' weights."""

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
    """Decorate ``TransformerModelChunkSchedulePlan.run`` to begin and end the passes of both chunks."""

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
                backward.finish()  # the first layer's gradients, while its input gradient is being sent

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
    """FSDP unit (a layer) that a schedule runs as several calls.

    Args:
        module: ``FSDPModule`` of the unit.
        at_once: inner modules whose weight gradients are computed in backward, and not deferred.
    """

    def __init__(self, module: Any, at_once: Iterable[Any] = ()) -> None:
        self.module, self.late = module, Late(module, at_once)
        self._state = module._get_fsdp_state()

    def gather(self) -> None:
        """All-gather the unit's weights and wait for them."""
        _gather(self.module)

    def ahead(self, direction: TrainingState) -> list[Any]:
        """Return the FSDP states of the units to prefetch while this unit computes."""
        return [state for state in _ahead(self._state, direction) if state is not self._state]

    def drop(self, direction: TrainingState, kept: Iterable[Any]) -> None:
        """Free the weights after a forward or backward (``direction``), unless their state is in ``kept``."""
        if self._state in kept:
            return
        for group in groups_of(self.module):
            if group.is_unsharded:
                with group.use_training_state(direction):
                    group.reshard()

    def finish(self) -> None:
        """Compute the unit's deferred weight gradients, and start to reduce its gradients."""
        self.late.run()


@contextlib.contextmanager
def beside(forward: Unit | None, backward: Unit | None) -> Iterator[None]:
    """Gather the weights of two interleaved units, prefetch the next ones, and free the weights on exit.

    All ranks must call it for the same units of their models, in the same order.
    """
    running = [
        (unit, direction)
        for unit, direction in ((backward, TrainingState.PRE_BACKWARD), (forward, TrainingState.FORWARD))
        if unit is not None
    ]
    for unit, _ in running:
        unit.gather()
    # The next units' gathers run while these two compute.
    next_ones = [(state, direction) for unit, direction in running for state in unit.ahead(direction)]
    for state, direction in next_ones:
        _issue(state, direction)
    with contextlib.nullcontext() if forward is None else forward.late.deferred():
        yield
    next_states = [state for state, _ in next_ones]
    for unit, direction in running:
        unit.drop(direction, next_states)


class Model:
    """Model or model chunk with FSDP units that a schedule runs as several calls.

    Args:
        root: outermost ``FSDPModule``.
        units: units that are run as several calls.

    Raises:
        SettingsError: FSDP2's state classes are not the supported ones.
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
        """Gather the root's own weights, and start to gather the first units' weights."""
        state = self._root._get_fsdp_state()
        if state._state_ctx.iter_forward_root is None:
            state._root_pre_forward(self._root, (), {})  # makes gathers wait for the optimizer's step
            state._state_ctx.iter_forward_root = None  # each unit is called on its own
        self._begin(TrainingState.FORWARD)

    def begin_backward(self) -> None:
        """Begin a backward pass, until :meth:`end_backward`; gathers weights like :meth:`begin_forward`."""
        self.in_backward = True
        self._begin(TrainingState.PRE_BACKWARD)

    def _begin(self, direction: TrainingState) -> None:
        _gather(self._root)
        state = self._root._get_fsdp_state()
        for unit_state in _ahead(state, direction):
            if unit_state is not state:
                _issue(unit_state, direction)

    def graph_ends(self) -> None:
        """Reset FSDP2's state after one of several autograd graphs, so that units may be called again."""
        for state in self._states:
            state._training_state = TrainingState.IDLE
            for group in state._fsdp_param_groups:
                group._training_state = TrainingState.IDLE
        self._states[0]._state_ctx.post_backward_final_callback_queued = False

    def finish(self) -> None:
        """Call :meth:`Unit.finish` on all units with deferred gradients."""
        for unit in self._units:
            if len(unit.late):
                unit.finish()

    def end_backward(self) -> None:
        """Compute deferred gradients, free all weights, and wait until all gradients are reduced."""
        self.finish()
        self.in_backward = False
        self._root._get_fsdp_state()._root_post_backward_final_callback()

    def drop_gradients(self) -> None:
        """Drop the gradients of a failed step."""
        self.in_backward = False
        for unit in self._units:
            unit.late.drop()
        # FSDP2 keeps gradients that it has not reduced, and would add them to the next step's.
        for state in self._states:
            for group in state._fsdp_param_groups:
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param._unsharded_param.grad = None


class _State(FSDPState):
    """FSDP2 state of a unit in a :class:`Model`; keeps the end of a graph from ending the backward pass."""

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
    """Gather a unit's weights for the block, which runs one part of its forward; then reshard."""
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
    """Mark gathered weights as memory that will be freed, so that other features do not swap them."""
    # FSDP2 frees their memory and fills it again.
    for group in groups_of(unit):
        for param in group.fsdp_params:
            saved_tensors.mark_freed(param._unsharded_param)


def _gather(unit: Any) -> None:
    for group in groups_of(unit):
        # In the forward state FSDP2 would keep this gather's buffer until the next gather has finished.
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
    """Return the ``FSDPParamGroup`` objects of a unit."""
    groups: list[Any] = unit._get_fsdp_state()._fsdp_param_groups
    return groups


# -- gradients that backward defers ----------------------------------------------------------------


class Late:
    """Deferred weight gradients of one unit.

    Args:
        unit: ``FSDPModule`` of the unit.
        without: inner modules whose weight gradients are not deferred.
    """

    def __init__(self, unit: Any, without: Iterable[Any] = ()) -> None:
        self._groups = groups_of(unit)
        apart = set(without)
        weights = [param for group in self._groups for param in group.fsdp_params]
        self._weights = [param for param in weights if param._module_info.module not in apart]
        self._queue: list[Queued] = []

    def deferred(self) -> AbstractContextManager[Collection[DeferredGradient]]:
        """Return a context in which weight gradients are deferred; the weights must be gathered."""
        # A schedule that collects gradients gets all of them, as from units that are called as modules.
        if are_queued():
            return also_queued(_matrices(self._groups))
        weights = [param.unsharded_param for param in self._weights]
        return defer_gradients(weights, lambda weight: QueuedGradient(weight, self._queue))

    def __len__(self) -> int:
        """Return the number of deferred gradients."""
        return len(self._queue)

    @torch.no_grad()
    def run(self) -> None:
        """Compute the deferred gradients, and start to reduce all gradients of the unit.

        The weights are not freed, because another microbatch may be using them.
        """
        while self._queue:
            weight, computed = _computed(self._queue.pop(0))  # frees each gradient's operands
            if computed is not None:
                weight.grad = computed if weight.grad is None else weight.grad + computed
        for group in self._groups:
            _reduce(group)

    def drop(self) -> None:
        """Drop the deferred gradients of a failed step."""
        self._queue.clear()


def _computed(queued: Queued) -> tuple[Tensor, Tensor | None]:
    return queued.weight, queued.gradient()


def _reduce(group: Any) -> None:
    """Reduce a group's gradients with FSDP2's ``post_backward``, keeping its weights and state."""
    state, reshards = group._training_state, group.reshard_after_backward
    group.reshard_after_backward = False  # another microbatch may be using the weights
    try:
        group.post_backward()
    finally:
        group._training_state, group.reshard_after_backward = state, reshards


# -- gradients that a schedule of whole chunks defers ----------------------------------------------


def leave_gradients(unit: Any) -> None:
    """Defer the weight gradients of a unit that is called as a module, if the schedule collects them.

    FSDP2 still frees the weights as usual, since computing a weight gradient does not need them.
    """
    entered: list[AbstractContextManager[Any]] = []

    def enter(module: Any, *_: Any) -> None:
        queued = also_queued(_matrices(groups_of(module)))
        queued.__enter__()
        entered.append(queued)

    def leave(*_: Any) -> None:
        if entered:  # empty if another pre-hook raised before ours
            entered.pop().__exit__(None, None, None)

    unit.register_forward_pre_hook(enter)
    unit.register_forward_hook(leave, always_call=True)


def _matrices(groups: Iterable[Any]) -> Iterator[Tensor]:
    weights = (param.unsharded_param for group in groups for param in group.fsdp_params)
    return (weight for weight in weights if weight.dim() > 1)  # only matrix products are deferred


def reduce_left(root: ref[Any]) -> None:
    """Reduce weight gradients that were computed after the model's backward had ended."""
    module: Any = root()
    module._get_fsdp_state()._root_post_backward_final_callback()
