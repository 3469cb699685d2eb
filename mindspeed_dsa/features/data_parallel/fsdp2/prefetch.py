"""Gathers of FSDP2 units issued ahead of the computation that hides them; for any job's ``FSDPModule``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_dsa.patches import versions

_graph_task_id = versions.private("torch._C:_current_graph_task_id", "FSDP2's prefetch")


class _InForward(list[Any]):
    """Units that follow in forward; none for a layer that backward runs again, where they have been used."""

    def __iter__(self) -> Iterator[Any]:
        in_backward = _graph_task_id() != -1
        return iter(()) if in_backward else super().__iter__()


def prefetch(units: Sequence[Any], ahead: int, root: Any = None, asynchronous: bool = False) -> None:
    """Have each unit start the gathers of its neighbours: the next in forward, those before in backward.

    At most ``ahead`` units are gathered beside the one that computes.

    Args:
        units: ``FSDPModule``, in the order in which a forward pass runs them.
        ahead: units; 0: every unit gathers its own weights when it runs.
        root: the ``FSDPModule`` around them, which runs first in either direction.
        asynchronous: issue gathers as works to wait for; without streams, only these overlap.
    """
    units = list(units)
    for at, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + ahead])
        state = unit._get_fsdp_state()
        state._states_to_forward_prefetch = _InForward(state._states_to_forward_prefetch)
        _set_backward_prefetch(unit, units[max(at - ahead, 0) : at][::-1])
    if root is not None:
        root.set_modules_to_forward_prefetch(units[:ahead])
        _set_backward_prefetch(root, units[-ahead:][::-1] if ahead else [])
        units.append(root)
    if asynchronous:
        for unit in units:
            unit._set_unshard_async_op(True)


def _set_backward_prefetch(unit: Any, others: Sequence[Any]) -> None:
    """Those alone: with none given FSDP2 gathers what ran before, in a pipeline another microbatch's unit.

    A unit whose backward runs has its weights, so that its own gather is none.
    """
    unit.set_modules_to_backward_prefetch(list(others) or [unit])
