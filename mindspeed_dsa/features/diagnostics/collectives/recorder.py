"""Recorder of the last collectives and messages of every group, started and ended.

Calls go to a file as they start and end. A record then needs no handler of signals and no last word: whatever
ends the process, they are there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from inspect import signature
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

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


class _Call(NamedTuple):
    """Arguments of a collective or a message, as far as they are recorded."""

    group: Any
    function: str
    tensors: tuple[tuple[int, Any, Any], ...]
    waits: bool
    source: int | None = None
    destination: int | None = None
    tag: int = 0


class _Group:
    """Calls of this rank in one group: by kind of call, their ring in the file, and how many there were."""

    __slots__ = ("__weakref__", "name", "ranks", "rings")

    def __init__(self, group: Any) -> None:
        self.name, self.ranks = str(group.group_name), tuple(dist.get_process_group_ranks(group))
        self.rings: dict[str, list[int]] = {}


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
        self._groups: WeakKeyDictionary[Any, _Group] = WeakKeyDictionary()
        self._watch: Watch | None = None
        self._ends: weakref.finalize[..., Recorder] | None = None
        self._failed = False

    def run(self, original: _Function, describe: Callable[..., _Call], args: Any, kwargs: Any) -> Any:
        """Make a call whose start and end are recorded; what fails in recording ends it, and not the call."""
        calls = slot = None
        if not self._failed:
            try:
                calls, slot = self._start(describe(*args, **kwargs))
            except Exception as error:
                self._give_up(error)
        self.inside.now, failure = True, ""
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.inside.now, self.changed = False, time.time()
            if calls is not None and slot is not None:
                try:
                    calls.end(slot, self.changed, failure)
                except Exception as error:
                    self._give_up(error)

    def _start(self, call: _Call) -> tuple[files.Calls | None, int | None]:
        """Write that a call starts; return the file and the place in it, if the group is this rank's."""
        known = self.group(call.group)
        if known is None or self._watch is None:
            return None, None
        key = "" if call.source is None else f"{call.source}>{call.destination}#{call.tag}"
        ring = known.rings.get(key)
        if ring is None:
            taken = {each[0] for group in self._known() for each in group.rings.values()}
            ring = known.rings[key] = [next(each for each in count() if each not in taken), 0]
            self._watch.calls.clear(ring[0])  # of a group that is gone
        ring[1] += 1
        self.changed = time.time()
        text = _text(known.name, *call[1:], names.current(), *_caller())
        return self._watch.calls, self._watch.calls.start(ring[0], ring[1], self.changed, text)

    def group(self, group: Any) -> _Group | None:
        """Return the record of a group; ``None`` for what is no group of this rank's."""
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return None
        known = self._groups.get(group)
        if known is None:
            if self._watch is None:
                self._watch = Watch(self._context.options, self._context.log, self)
                self._ends = weakref.finalize(self, self._watch.stop)  # with the session
            known = self._groups[group] = _Group(group)
            self._watch.list_group(self._in_words(group, known, self._kinds()))
        return known

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        with contextlib.suppress(Exception):
            self.stop()
            folder = self._context.options.folder
            self._context.log.warning(
                "--record-collectives %s: rank %d records no more (%r); training goes on. Name a folder that "
                "can be written to",
                folder,
                dist.get_rank(),
                error,
                ranks="all",
            )

    def strike(self, group: Any) -> None:
        """Forget a group that is to be destroyed."""
        known = self._groups.pop(group, None)
        if known is not None and self._watch is not None:
            try:
                self._watch.strike_group(known.name)
            except OSError as error:
                self._give_up(error)

    def stop(self) -> None:
        """Forget all groups: they are gone."""
        watch = self._watch
        self.forget()
        if watch is not None:
            watch.stop()

    def forget(self) -> None:
        """Forget all groups and the watch, as in a forked child, whose parent goes on."""
        if self._ends is not None:
            self._ends.detach()  # it holds the watch
        self._groups, self._watch = WeakKeyDictionary(), None

    # -- for the file -----------------------------------------------------------------------------

    def place(self) -> str:
        """Return where the schedule stands, in words."""
        running, done = (" beside ".join(map(str, each)) for each in (self.passes, self.after))
        where = running or (f"after {done}" if done else "before forwards and backwards")
        return f"step {self.step}: {where}" if self.step else ""

    def groups(self) -> tuple[files.Group, ...]:
        """Return all groups, without their calls."""
        kinds = self._kinds()
        return tuple(self._in_words(group, known, kinds) for group, known in _copied(self._groups))

    @staticmethod
    def _in_words(group: Any, known: _Group, kinds: dict[int, list[str]]) -> files.Group:
        return files.Group(known.name, tuple(kinds.get(id(group), ())) or _described(group), known.ranks)

    def _known(self) -> list[_Group]:
        return [known for _, known in _copied(self._groups)]

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


def _copied(groups: WeakKeyDictionary[Any, _Group]) -> list[tuple[Any, _Group]]:
    while True:
        try:
            return list(groups.items())
        except RuntimeError:  # one was added meanwhile
            continue


@lru_cache(maxsize=1 << 14)  # steps repeat their calls
def _text(
    group: str,
    function: str,
    tensors: tuple[tuple[int, Any, Any], ...],
    waits: bool,
    source: int | None,
    destination: int | None,
    tag: int,
    name: Name,
    file: str,
    line: int,
    caller: str,
) -> bytes:
    return files.in_words(
        group,
        function,
        tuple(map(_tensor_in_words, tensors)),
        waits,
        source,
        destination,
        tag,
        str(name),
        f"{file}:{line} {caller}",
    )


def _tensor_in_words(value: tuple[int, Any, Any]) -> str:
    count, shape, dtype = value
    return f"{f'{count} x ' if count else ''}{list(shape)} {str(dtype).removeprefix('torch.')}"


def _tensors(values: Iterable[Any]) -> tuple[tuple[int, Any, Any], ...]:
    """Return count, shape and dtype of tensors and lists of them, without the tensors."""
    found: list[tuple[int, Any, Any]] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((0, value.shape, value.dtype))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            found.append((len(value), value[0].shape, value[0].dtype))
    return tuple(found)


def _caller() -> tuple[str, int, str]:
    """Return file, line and function of the innermost call that is not of a module which passes calls on."""
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


# -- decorators -------------------------------------------------------------------------------------


def record_collective(original: _Function, context: Context[Options]) -> _Function:
    """Decorate a function that all ranks of a group call."""
    recorder, function = context.state(Recorder), original.__name__
    position = list(signature(original).parameters).index("group")

    def describe(*args: Any, **kwargs: Any) -> _Call:
        group = kwargs.get("group", args[position] if len(args) > position else None)
        tensors = _tensors((*args[:2], *kwargs.values()))
        return _Call(group, function, tensors, not kwargs.get("async_op", False))

    def collective(*args: Any, **kwargs: Any) -> Any:
        if recorder.inside.now:
            return original(*args, **kwargs)
        return recorder.run(original, describe, args, kwargs)

    return collective


def record_message(original: _Function, context: Context[Options]) -> _Function:
    """Decorate a function with which one rank sends to another, or receives."""
    recorder, function = context.state(Recorder), original.__name__
    sends, waits = function.endswith("send"), not function.startswith("i")
    peer_name = "dst" if sends else "src"

    def describe(*args: Any, **kwargs: Any) -> _Call:
        group = kwargs.get("group", args[2] if len(args) > 2 else None)
        peer = kwargs.get(peer_name, args[1] if len(args) > 1 else None)
        if peer is None and kwargs.get(f"group_{peer_name}") is not None:
            peer = dist.get_process_group_ranks(group)[kwargs[f"group_{peer_name}"]]
        other, rank = -1 if peer is None else int(peer), dist.get_rank()
        source, destination = (rank, other) if sends else (other, rank)
        tensors = _tensors(args[:1] or (kwargs.get("tensor"),))
        tag = kwargs.get("tag", args[3] if len(args) > 3 else 0)
        return _Call(group, function, tensors, waits, source, destination, tag)

    def message(*args: Any, **kwargs: Any) -> Any:
        if recorder.inside.now:
            return original(*args, **kwargs)
        return recorder.run(original, describe, args, kwargs)

    return message


def stop_recording(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``destroy_process_group``."""
    recorder = context.state(Recorder)

    def destroy_process_group(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if group is None or group is dist.group.WORLD:
            recorder.stop()
        elif isinstance(group, dist.ProcessGroup):
            recorder.strike(group)
        return original(group, *args, **kwargs)

    return destroy_process_group
