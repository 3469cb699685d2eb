"""A profile's events as an account: whose time, whose operators, whose synchronisations.

Backward belongs to the module whose forward made the node: torch gives a node and the operator that made it
the same number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PREFIX = "module::"
_BACKWARD = "autograd::engine::evaluate_function"
_LAYER = "TransformerLayer"
_OUTSIDE = "(outside of modules)"
_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
_COMPILED = ("cpp_fused", "triton_")


@dataclass
class Row:
    """One class of modules in one step.

    Attributes:
        calls: of its forward.
        forward_us: the host's microseconds in forward, without those of modules inside of it.
        backward_us: likewise in backward.
        launches: operators that did the work themselves, and compiled kernels.
        waits: synchronisations with the device.
        in_layers: whether it lies in transformer layers.
    """

    calls: int = 0
    forward_us: float = 0.0
    backward_us: float = 0.0
    launches: int = 0
    waits: int = 0
    in_layers: bool = False


def of_events(events: Sequence[Any]) -> dict[str, Any]:
    """``{"layers": forwards of layers, "classes": {name: fields of Row}}``.

    Args:
        events: ``function_events`` of torch's profiler, with a range for each module's forward.
    """
    rows: dict[str, Row] = defaultdict(Row)
    owner_of_node: dict[int, tuple[str, bool]] = {}
    owners: dict[int, tuple[str, bool, Any]] = {}
    ordered = sorted(events, key=lambda event: event.time_range.start)
    for event in ordered:
        name, in_layers, node = _owner(event, owners)
        if node is None and event.sequence_nr >= 0:
            owner_of_node[event.sequence_nr] = (name, in_layers)
    for event in ordered:
        name, in_layers, node = _owner(event, owners)
        if node is not None:
            name, in_layers = owner_of_node.get(node.sequence_nr, (_OUTSIDE, False))
        row = rows[name]
        row.in_layers = row.in_layers or in_layers
        row.calls += event.name.startswith(PREFIX)
        if node is None:
            row.forward_us += event.self_cpu_time_total
        else:
            row.backward_us += event.self_cpu_time_total
        row.launches += is_launch(event)
        row.waits += is_wait(event)
    layers = sum(event.name.startswith(PREFIX) and _LAYER in event.name for event in ordered)
    return {"layers": layers, "classes": {name: asdict(row) for name, row in rows.items()}}


def _owner(event: Any, known: dict[int, tuple[str, bool, Any]]) -> tuple[str, bool, Any]:
    """Class of the innermost module around an event, whether in a layer, and the backward node it is in."""
    found = known.get(event.id)
    if found is None:
        parent = event.cpu_parent
        found = (_OUTSIDE, False, None) if parent is None else _owner(parent, known)
        if event.name.startswith(_BACKWARD):
            found = (*found[:2], event)
        elif event.name.startswith(PREFIX):
            name = event.name.removeprefix(PREFIX)
            # Modules called inside of backward are recomputed: a forward of their own.
            found = (name, found[1] or _LAYER in name, None)
        known[event.id] = found
    return found


def is_launch(event: Any) -> bool:
    """Whether an event is an operator that did the work itself, or a kernel of compiled code."""
    if any(part in event.name for part in _COMPILED):
        return True
    return _is_operator(event.name) and not any(_is_operator(child.name) for child in event.cpu_children)


def _is_operator(name: str) -> bool:
    return "::" in name and not name.startswith((PREFIX, "autograd::", "torch::"))


def is_wait(event: Any) -> bool:
    """Whether the host waits for the device in an event, and in none of those inside of it."""
    waits = event.name in _WAITS or "Synchronize" in event.name
    return waits and not any(map(is_wait, _descendants(event)))


def _descendants(event: Any) -> Iterable[Any]:
    for child in event.cpu_children:
        yield child
        yield from _descendants(child)
