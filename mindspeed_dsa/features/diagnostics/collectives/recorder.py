"""Recorder of the last collectives and messages of every group, started and ended."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from inspect import signature
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.diagnostics.collectives.feature import Options
from mindspeed_dsa.features.diagnostics.collectives.watch import Watch
from mindspeed_dsa.megatron.pipeline_steps import Follower
from mindspeed_dsa.parallel import names
from mindspeed_dsa.parallel.names import Name, Pass
from mindspeed_dsa.runs import collectives as files

_Function = Callable[..., Any]
_KEPT = 128
"""Calls of each group; what a step starts in one is more, and what hangs is among the last."""
_BETWEEN = ("torch.distributed", "mindspeed_dsa.parallel", "mindspeed_dsa.patches", __name__)
"""Modules that pass calls on: the line that is shown lies above them."""
_KINDS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "TP",
    "PIPELINE_MODEL_PARALLEL_GROUP": "PP",
    "CONTEXT_PARALLEL_GROUP": "CP",
    "DATA_PARALLEL_GROUP": "DP",
    "DATA_PARALLEL_GROUP_WITH_CP": "DP-CP",
    "EXPERT_MODEL_PARALLEL_GROUP": "EP",
    "EXPERT_TENSOR_PARALLEL_GROUP": "ETP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ETP-EP",
    "EXPERT_DATA_PARALLEL_GROUP": "EDP",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "TP-CP",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "TP-DP",
    "MODEL_PARALLEL_GROUP": "TP-PP",
}
"""Megatron's names of its groups, in ``parallel_state`` and as descriptions, and what its users call them."""
_KNOWN = ("world", *_KINDS.values())


class _Call:
    """One call, with what costs nothing to keep: words are made of it when a file is written."""

    __slots__ = (
        *("code", "destination", "error", "function", "line", "name", "number", "returned", "source"),
        *("started", "tag", "tensors", "waits"),
    )

    def __init__(self, function: str, number: int, tensors: list[Any], waits: bool) -> None:
        self.function, self.number, self.tensors, self.waits = function, number, tensors, waits
        self.name: Name = names.current()
        self.code, self.line = _caller()
        self.started = time.time()
        self.returned: float | None = None
        self.error = ""
        self.source: int | None = None
        self.destination: int | None = None
        self.tag = 0


class _Group:
    """Calls of this rank in one group."""

    def __init__(self, group: Any) -> None:
        self.name, self.ranks = str(group.group_name), tuple(dist.get_process_group_ranks(group))
        self.collectives, self.messages = 0, Counter[str]()
        self.calls: deque[_Call] = deque(maxlen=_KEPT)


class _Inside(threading.local):
    """Mark of a thread that runs a recorded function, whose own calls are part of it."""

    now = False


class Recorder:
    """State of a session's recording.

    Attributes:
        step: of the run, from 1.
        passes: that run.
        after: the last ones that ran.
        follower: of the schedule, which sets both.
        changed: when a call started or ended last, in seconds since the epoch.
    """

    def __init__(self, context: Context[Options]) -> None:
        self._context = context
        self.step, self.passes, self.after = 0, tuple[Pass, ...](), tuple[Pass, ...]()
        self.follower: Follower | None = None
        self.changed = 0.0
        self.inside = _Inside()
        self._groups: dict[Any, _Group] = {}
        self._watch: Watch | None = None

    def group(self, group: Any) -> _Group | None:
        """Return the record of a group; ``None`` for what is no group of this rank's."""
        if group is None:
            group = dist.group.WORLD
        known = self._groups.get(group)
        if known is None and isinstance(group, dist.ProcessGroup):
            known = self._groups[group] = _Group(group)
            if self._watch is None:
                self._watch = Watch(self._context.options, self._context.log, self)
                weakref.finalize(self, self._watch.stop)  # with the session
        return known

    def run(self, original: _Function, call: _Call, args: Any, kwargs: Any) -> Any:
        """Make a call whose start is recorded, and record its end."""
        self.inside.now, self.changed = True, call.started
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            call.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.inside.now = False
            call.returned = self.changed = time.time()

    def stop(self) -> None:
        """Forget all groups: they are gone."""
        if self._watch is not None:
            self._watch.stop()
        self._groups, self._watch = {}, None

    # -- for the file -----------------------------------------------------------------------------

    def place(self) -> str:
        """Return where the schedule stands, in words."""
        running, done = (" beside ".join(map(str, each)) for each in (self.passes, self.after))
        where = running or (f"after {done}" if done else "before forwards and backwards")
        return f"step {self.step}: {where}" if self.step else ""

    def groups(self) -> tuple[files.Group, ...]:
        """Return everything that is recorded; the threads that call go on meanwhile."""
        kinds = self._kinds()
        return tuple(
            files.Group(
                known.name,
                tuple(kinds.get(id(group), ())) or _described(group),
                known.ranks,
                known.collectives,
                dict(known.messages),
                tuple(_in_words(call) for call in _copied(known.calls)),
            )
            for group, known in list(self._groups.items())
        )

    def _kinds(self) -> dict[int, list[str]]:
        """Return what ``parallel_state`` calls its groups."""
        found: dict[int, list[str]] = {id(dist.group.WORLD): ["world"]}
        state = sys.modules.get(f"{self._context.megatron.root}.core.parallel_state")
        for name, value in list(vars(state).items()) if state is not None else ():
            for group in value if isinstance(value, list) else [value]:
                if isinstance(group, dist.ProcessGroup) and name.isupper():
                    found.setdefault(id(group), []).append(_kind(name.lstrip("_")))
        return {number: [each for each in own if each in _KNOWN] or own for number, own in found.items()}


def _kind(name: str) -> str:
    over_gloo = name.endswith("_GLOO")
    name = name.removesuffix("_GLOO")
    kind = _KINDS.get(name) or name.removesuffix("_GROUP").replace("_", " ").lower()
    return f"{kind} over gloo" if over_gloo else kind


def _described(group: Any) -> tuple[str, ...]:
    description = str(getattr(group, "group_desc", "") or "")
    return () if description in ("", "undefined") else (_kind(description),)


def _copied(calls: deque[_Call]) -> list[_Call]:
    while True:
        try:
            return list(calls)
        except RuntimeError:  # one was added meanwhile
            continue


def _in_words(call: _Call) -> files.Call:
    return files.Call(
        call.function,
        call.number,
        tuple(map(_tensor_in_words, call.tensors)),
        str(call.name),
        f"{call.code.co_filename}:{call.line} {call.code.co_name}",
        call.started,
        call.returned,
        call.waits,
        call.error,
        call.source,
        call.destination,
        call.tag,
    )


def _tensor_in_words(value: Any) -> str:
    count, shape, dtype = value
    return f"{f'{count} x ' if count else ''}{list(shape)} {str(dtype).removeprefix('torch.')}"


def _tensors(values: Iterator[Any]) -> list[Any]:
    """Return count, shape and dtype of tensors and lists of them, without the tensors."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((0, value.shape, value.dtype))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            found.append((len(value), value[0].shape, value[0].dtype))
    return found


def _caller() -> tuple[CodeType, int]:
    """Return the innermost line that is not of a module which passes calls on."""
    frame = sys._getframe(3)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


# -- decorators -------------------------------------------------------------------------------------


def record_collective(original: _Function, context: Context[Options]) -> _Function:
    """Decorate a function that all ranks of a group call."""
    recorder, function = context.state(Recorder), original.__name__
    position = list(signature(original).parameters).index("group")

    def collective(*args: Any, **kwargs: Any) -> Any:
        if recorder.inside.now:
            return original(*args, **kwargs)
        known = recorder.group(kwargs.get("group", args[position] if len(args) > position else None))
        if known is None:
            return original(*args, **kwargs)
        known.collectives += 1
        tensors = _tensors(iter((*args[:2], *kwargs.values())))
        call = _Call(function, known.collectives, tensors, not kwargs.get("async_op", False))
        known.calls.append(call)
        return recorder.run(original, call, args, kwargs)

    return collective


def record_message(original: _Function, context: Context[Options]) -> _Function:
    """Decorate a function with which one rank sends to another, or receives."""
    recorder, function = context.state(Recorder), original.__name__
    sends, waits = function.endswith("send"), not function.startswith("i")
    peer_name = "dst" if sends else "src"

    def message(*args: Any, **kwargs: Any) -> Any:
        if recorder.inside.now:
            return original(*args, **kwargs)
        group = kwargs.get("group", args[2] if len(args) > 2 else None)
        known = recorder.group(group)
        if known is None:
            return original(*args, **kwargs)
        peer = kwargs.get(peer_name, args[1] if len(args) > 1 else None)
        if peer is None and kwargs.get(f"group_{peer_name}") is not None:
            peer = known.ranks[kwargs[f"group_{peer_name}"]]
        other, rank = -1 if peer is None else int(peer), dist.get_rank()
        tag = kwargs.get("tag", args[3] if len(args) > 3 else 0)
        source, destination = (rank, other) if sends else (other, rank)
        key = f"{source}>{destination}#{tag}"
        known.messages[key] += 1
        tensors = _tensors(iter(args[:1] or (kwargs.get("tensor"),)))
        call = _Call(function, known.messages[key], tensors, waits)
        call.source, call.destination, call.tag = source, destination, tag
        known.calls.append(call)
        return recorder.run(original, call, args, kwargs)

    return message


def stop_recording(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``destroy_process_group``."""
    recorder = context.state(Recorder)

    def destroy_process_group(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if group is None or group is dist.group.WORLD:
            recorder.stop()
        return original(group, *args, **kwargs)

    return destroy_process_group
