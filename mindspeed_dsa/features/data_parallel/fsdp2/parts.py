"""FSDP2's units in a schedule that runs parts of layers, one microbatch's forward beside another's backward.

FSDP2 gathers and reduces in hooks of modules' calls, and such a schedule calls parts of layers. So it says
which units it is about to run, in one direction or both, and for them gathers, drops and reductions are done
here; units that are called as modules keep their hooks. Two more things differ from a backward pass in one
piece. The end of a graph is not the end of a backward pass: FSDP2 would drop all weights there, those of the
forward beside it included. And a unit's gradients are complete when the last of its weights' gradients has
been computed, which may be long after its weights have gone::

    forward.begin_forward(); backward.begin_backward()    # models, or chunks of one
    with beside(one.forward, another.backward):           # units; None where a direction runs alone
        ...                                               # parts of both
    another.backward.finish()                             # any time later, in the same order on all ranks
    backward.end_backward()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from mindspeed_dsa.features.data_parallel.fsdp2 import checks
from mindspeed_dsa.features.data_parallel.fsdp2.delayed import Late, groups_of
from mindspeed_dsa.parallel import saved_tensors


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
        """States of the units that run next, whose gathers are issued while this one computes."""
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
    """Surrounds all parts of a forward and of a backward that run together; both may be of one unit.

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
    kept = [state for state, _ in next_ones]
    for unit, direction in running:
        unit.drop(direction, kept)


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
        """The same for a backward, whose graphs end where :meth:`end_backward` is called."""
        self.in_backward = True
        self._begin(TrainingState.PRE_BACKWARD)

    def _begin(self, direction: TrainingState) -> None:
        _gather(self._root)
        state = self._root._get_fsdp_state()
        for each in _ahead(state, direction):
            if each is not state:
                _issue(each, direction)

    def graph_ends(self) -> None:
        """One of a backward's graphs has been run: units that were called in it may be called again."""
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


class _State(FSDPState):
    """Of a unit of such a model, run in parts or called as a module."""

    model: Model

    def _root_post_backward_final_callback(self) -> None:
        if self.model.in_backward:
            self.model.graph_ends()
        else:
            super()._root_post_backward_final_callback()

    def _reset_iter_state(self) -> None:
        self.model.drop_gradients()
        super()._reset_iter_state()


def mark_gathered(unit: Any, *_: Any) -> None:
    """The memory of gathered weights is freed and filled again: who moves saved tensors leaves it alone."""
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
