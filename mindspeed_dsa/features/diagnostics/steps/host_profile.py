"""One step under torch's profiler, with a range for each module's forward, and the next one by function."""

from __future__ import annotations

import cProfile
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as torch_modules

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.diagnostics.steps.feature import ProfileOptions
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.compose import is_patch
from mindspeed_dsa.runs import files

_PACKAGE = str(Path(__file__).parents[3])
_PLATFORM = "features/platform/"
_SHOWN = 12


class Recorder(pipeline_steps.Follower):
    """Counts a session's training steps; records the chosen one and the one after it."""

    def __init__(self, context: Context[ProfileOptions]) -> None:
        super().__init__(context.megatron)
        self._options, self._steps = context.options, 0
        self._root = context.megatron.root
        self._profile: Any = None
        self._functions: cProfile.Profile | None = None
        self._hooks: list[Any] = []
        self._ranges: list[Any] = []
        self._started = 0.0
        self._record: dict[str, Any] = {}

    def begins(self, step: dict[str, Any]) -> bool:
        """Start the profiler that this step is for."""
        self._steps += 1
        number = self._steps - self._options.step
        if number not in (0, 1) or (dist.is_initialized() and dist.get_rank() != 0):
            return False
        platforms.current().synchronize()
        if number == 0:
            self._hooks = [
                torch_modules.register_module_forward_pre_hook(self._enter),
                torch_modules.register_module_forward_hook(self._leave, always_call=True),
            ]
            self._profile = torch.autograd.profiler.profile()
            # torch_npu puts a name of its own profiler in the place of ProfilerActivity.CPU.
            self._profile.kineto_activities = {torch.profiler.ProfilerActivity.__members__["CPU"]}
            self._profile.__enter__()
        else:
            self._functions = cProfile.Profile()
            self._functions.enable()
        self._started = time.perf_counter()
        return True

    def ends(self, step: dict[str, Any]) -> None:
        """Stop it; after the second one write the file."""
        seconds = time.perf_counter() - self._started
        if self._functions is not None:
            self._functions.disable()
            self._record["library"] = own_share(self._functions)
            files.write_atomically(self._options.file, json.dumps(self._record, indent=1) + "\n")
            return
        self._profile.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._record = {
            "step": self._steps,
            "seconds": seconds,
            "features_on": self._options.features_on,
            "megatron_core": versions.of_megatron(self._root),
            **of_events(self._profile.function_events),
        }

    def _enter(self, module: Any, inputs: Any) -> None:
        span = torch.autograd.profiler.record_function(PREFIX + type(module).__name__)
        span.__enter__()
        self._ranges.append(span)

    def _leave(self, module: Any, inputs: Any, output: Any) -> None:
        self._ranges.pop().__exit__(None, None, None)


def own_share(functions: cProfile.Profile) -> dict[str, Any]:
    """Time in this library's own lines of Python, without what they call, of all functions' time.

    Returns:
        ``share`` of all lines; ``patches``, that of the functions which stand in Megatron's places, without
        what these call to do Megatron's work in another way; ``platform``, that of the functions which stand
        for a device that is not there; ``functions``, the most costly.
    """
    total, patches, platform, own = 0.0, 0.0, 0.0, []
    for entry in functions.getstats():
        total += entry.inlinetime
        code = entry.code
        if not isinstance(code, str) and code.co_filename.startswith(_PACKAGE):
            place = Path(code.co_filename).relative_to(_PACKAGE).as_posix()
            own.append((1e6 * entry.inlinetime, entry.callcount, f"{place}:{code.co_name}"))
            if place.startswith(_PLATFORM):
                platform += entry.inlinetime
            elif is_patch(code):
                patches += entry.inlinetime
    own.sort(reverse=True)
    names = ("microseconds", "calls", "function")
    return {
        "share": sum(each[0] for each in own) / (1e6 * total) if total else 0.0,
        "patches": patches / total if total else 0.0,
        "platform": platform / total if total else 0.0,
        "functions": [dict(zip(names, each, strict=True)) for each in own[:_SHOWN]],
    }


def record_steps(original: Callable[..., Any], context: Context[ProfileOptions]) -> Callable[..., Any]:
    """Decorate ``get_forward_backward_func``."""
    return pipeline_steps.follow_steps(original, context.state(Recorder))


_USER = "the account of a host profile"
_schemas = versions.private("torch._C:_jit_get_schemas_for_operator", _USER)
_has_kernel = versions.private("torch._C:_dispatch_has_kernel", _USER)
_has_kernel_for = versions.private("torch._C:_dispatch_has_kernel_for_dispatch_key", _USER)
PREFIX = "module::"
_BACKWARD = "autograd::engine::evaluate_function"
_LAYER = "TransformerLayer"
_OUTSIDE = "(outside of modules)"
_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
_COMPILED = ("cpp_fused", "triton_")
_MEMORY = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::_unsafe_view", "aten::lift_fresh")


@dataclass
class Row:
    """Figures of one class of modules in one step.

    Attributes:
        calls: of its forward.
        forward_us: the host's microseconds in forward, without those of modules inside of it.
        backward_us: likewise in backward.
        launches: operators that compute or copy, and compiled kernels.
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
    """Return ``{"layers": forwards of layers, "classes": {name: fields of Row}}``.

    A layer that is recomputed in backward has passed once: its second forward is part of what the pass costs.

    Args:
        events: ``function_events`` of torch's profiler, with a range for each module's forward.
    """
    rows: dict[str, Row] = defaultdict(Row)
    owner_of_node: dict[tuple[int, int], tuple[str, bool]] = {}  # each thread numbers its own nodes
    owners: dict[int, tuple[str, bool, Any]] = {}
    ordered = sorted(events, key=lambda event: event.time_range.start)
    for event in ordered:
        name, in_layers, node = _owner(event, owners)
        if node is None and event.sequence_nr >= 0:
            owner_of_node[event.thread, event.sequence_nr] = (name, in_layers)
    for event in ordered:
        name, in_layers, node = _owner(event, owners)
        if node is not None:
            name, in_layers = owner_of_node.get((node.fwd_thread, node.sequence_nr), (_OUTSIDE, False))
        row = rows[name]
        row.in_layers = row.in_layers or in_layers
        row.calls += event.name.startswith(PREFIX)
        if node is None:
            row.forward_us += event.self_cpu_time_total
        else:
            row.backward_us += event.self_cpu_time_total
        row.launches += is_launch(event)
        row.waits += is_wait(event)
    layers = sum(map(_is_first_pass, ordered))
    return {"layers": layers, "classes": {name: asdict(row) for name, row in rows.items()}}


def _owner(event: Any, known: dict[int, tuple[str, bool, Any]]) -> tuple[str, bool, Any]:
    """Return the class of an event's innermost module, whether in a layer, and its backward node."""
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


def _is_first_pass(event: Any) -> bool:
    """Return whether a layer's forward begins here that is no recomputation."""
    if not (event.name.startswith(PREFIX) and _LAYER in event.name):
        return False
    return not any(each.name.startswith(_BACKWARD) for each in _ancestors(event))


def is_launch(event: Any) -> bool:
    """Return whether an event is an operator that computes or copies, or a kernel of compiled code.

    An operator of ATen includes whatever it calls to do its work; an operator of a library counts as its
    parts, if it has any. Views, allocations and operators that only call others are none.
    """
    if any(part in event.name for part in _COMPILED):
        return True
    if not _computes(event.name):
        return False
    if any(each.name.startswith("aten::") and _computes(each.name) for each in _ancestors(event)):
        return False
    return event.name.startswith("aten::") or not any(_computes(each.name) for each in _descendants(event))


@cache
def _computes(name: str) -> bool:
    if "::" not in name or name.startswith((PREFIX, "autograd::", "torch::", *_MEMORY)):
        return False
    if not name.startswith("aten::"):
        return True
    schemas = _schemas(name)
    if any(out.alias_info and not out.alias_info.is_write for each in schemas for out in each.returns):
        return False  # a view
    own = [each.overload_name for each in schemas if not each.overload_name.endswith("out")]
    full = [f"{name}.{each}" if each else name for each in own]
    return any(
        not _has_kernel_for(each, "CompositeImplicitAutograd") or _has_kernel_for(each, "CPU")
        for each in full
        if _has_kernel(each)  # others are TorchScript's alone, such as sizes
    )


def _ancestors(event: Any) -> Iterator[Any]:
    while (event := event.cpu_parent) is not None:
        yield event


def is_wait(event: Any) -> bool:
    """Return whether the host waits for the device in an event, and in none of those inside of it."""
    waits = event.name in _WAITS or "Synchronize" in event.name
    return waits and not any(map(is_wait, _descendants(event)))


def _descendants(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        yield child
        yield from _descendants(child)
