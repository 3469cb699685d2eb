"""Recorder of the start and end of recent collectives and messages, per process group.

Calls are written to a file when they start and when they end. The file is therefore complete however the
process dies, without a signal handler.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
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
"""Modules that only forward calls. The recorded line is in the code that calls them."""
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
"""Dict from Megatron's name of a group to its usual short name."""
_KNOWN = ("world", *_KINDS.values())


class _Call(NamedTuple):
    """Arguments of a collective or message, as recorded."""

    group: Any
    function: str
    tensors: tuple[tuple[int, Any, Any], ...]
    waits: bool
    source: int | None = None
    destination: int | None = None
    tag: int = 0


class _Group:
    """Calls of this rank in one process group."""

    __slots__ = ("__weakref__", "name", "ranks", "rings")

    def __init__(self, group: Any) -> None:
        self.name, self.ranks = str(group.group_name), tuple(dist.get_process_group_ranks(group))
        self.rings: dict[str, list[int]] = {}


class _Inside(threading.local):
    """Per-thread flag: a recorded function is running, so that calls it makes are not recorded again."""

    now = False


class Recorder:
    """Recorder of one session.

    Attributes:
        step: number of the training step, from 1.
        passes: forwards and backwards that are running.
        after: forwards and backwards that finished last.
        follower: callback of the schedule, which sets ``passes`` and ``after``.
        changed: time of the last start or end of a call, in seconds since the epoch.
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
        # Weights of moved experts are passed on by a thread of their own.
        self._lock = threading.Lock()

    def run(self, original: _Function, describe: Callable[..., _Call], args: Any, kwargs: Any) -> Any:
        """Call ``original``, and record its start and end. If recording fails, only the recording stops."""
        if self.inside.now:  # a collective that another one calls
            return original(*args, **kwargs)
        calls = slot = None
        if not self._failed:
            try:
                call = describe(*args, **kwargs)
                with self._lock:
                    calls, slot = self._start(call)
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
        """Record the start of a call; return the file and its slot. None: this rank is not in the group."""
        record = self.group(call.group)
        if record is None or self._watch is None:
            return None, None
        key = "" if call.source is None else f"{call.source}>{call.destination}#{call.tag}"
        ring = record.rings.get(key)
        if ring is None:
            # The lowest ring that no group uses: rings of destroyed groups are used again.
            taken = {each[0] for group in self._known() for each in group.rings.values()}
            ring = record.rings[key] = [next(each for each in count() if each not in taken), 0]
            self._watch.calls.clear(ring[0])  # it may have calls of a destroyed group
        ring[1] += 1
        self.changed = time.time()
        name = names.current()
        # Autograd's threads for devices do not get the main thread's name.
        name = name if name.passes else replace(name, passes=self.passes)
        text = _text(record.name, *call[1:], name, *_caller())
        return self._watch.calls, self._watch.calls.start(ring[0], ring[1], self.changed, text)

    def group(self, group: Any) -> _Group | None:
        """Return the record of a group, or None if this rank is not in it."""
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return None
        record = self._groups.get(group)
        if record is None:
            if self._watch is None:
                self._watch = Watch(self._context.options, self._context.log, self)
                self._ends = weakref.finalize(self, self._watch.stop)  # at the session's end
            record = self._groups[group] = _Group(group)
            self._watch.list_group(self._in_words(group, record, self._kinds()))
        return record

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
        """Drop the record of a process group that is about to be destroyed."""
        record = self._groups.pop(group, None)
        if record is not None and self._watch is not None:
            try:
                self._watch.strike_group(record.name)
            except OSError as error:
                self._give_up(error)

    def stop(self) -> None:
        """Remove all groups and stop the watch thread."""
        watch = self._watch
        self.forget()
        if watch is not None:
            watch.stop()

    def forget(self) -> None:
        """In a forked child, drop all groups and the watch, without stopping the parent's watch."""
        if self._ends is not None:
            self._ends.detach()  # the finalizer would stop the watch
        self._groups, self._watch = WeakKeyDictionary(), None
        self._lock = threading.Lock()  # the parent's may be held by a thread that the child lacks

    # -- for the file -----------------------------------------------------------------------------

    def place(self) -> str:
        """Return the current step, forwards and backwards as text."""
        running, done = (" beside ".join(map(str, each)) for each in (self.passes, self.after))
        where = running or (f"after {done}" if done else "before forwards and backwards")
        return f"step {self.step}: {where}" if self.step else ""

    def groups(self) -> tuple[files.Group, ...]:
        """Return a description of all groups, without their calls."""
        kinds = self._kinds()
        return tuple(self._in_words(group, known, kinds) for group, known in _copied(self._groups))

    @staticmethod
    def _in_words(group: Any, known: _Group, kinds: dict[int, list[str]]) -> files.Group:
        return files.Group(known.name, tuple(kinds.get(id(group), ())) or _described(group), known.ranks)

    def _known(self) -> list[_Group]:
        return [known for _, known in _copied(self._groups)]

    def _kinds(self) -> dict[int, list[str]]:
        """Return a dict from ``id(group)`` to the group's names in ``parallel_state``."""
        kinds: dict[int, list[str]] = {id(dist.group.WORLD): ["world"]}
        state = sys.modules.get(f"{self._context.megatron.root}.core.parallel_state")
        for name, value in list(vars(state).items()) if state is not None else ():
            for group in value if isinstance(value, list) else [value]:
                if isinstance(group, dist.ProcessGroup) and name.isupper():
                    kinds.setdefault(id(group), []).append(_kind(name.lstrip("_")))
        return {number: [each for each in own if each in _KNOWN] or own for number, own in kinds.items()}


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
        except RuntimeError:  # another thread added a group during the iteration
            continue


@lru_cache(maxsize=1 << 14)  # every step repeats the same calls
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
    """Return count, shape and dtype of tensors and tensor lists, without references to them."""
    described: list[tuple[int, Any, Any]] = []
    for value in values:
        if isinstance(value, Tensor):
            described.append((0, value.shape, value.dtype))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            described.append((len(value), value[0].shape, value[0].dtype))
    return tuple(described)


def _caller() -> tuple[str, int, str]:
    """Return file, line and function of the innermost stack frame outside of :data:`_BETWEEN`."""
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


# -- decorators -------------------------------------------------------------------------------------


def record_collective(original: _Function, context: Context[Options]) -> _Function:
    """Decorate a collective function of ``torch.distributed`` to record its calls."""
    recorder, function = context.state(Recorder), original.__name__
    position = list(signature(original).parameters).index("group")

    def describe(*args: Any, **kwargs: Any) -> _Call:
        group = kwargs.get("group", args[position] if len(args) > position else None)
        tensors = _tensors((*args[:2], *kwargs.values()))
        return _Call(group, function, tensors, not kwargs.get("async_op", False))

    return lambda *args, **kwargs: recorder.run(original, describe, args, kwargs)


def record_message(original: _Function, context: Context[Options]) -> _Function:
    """Decorate a point-to-point function of ``torch.distributed`` to record its calls."""
    recorder, function = context.state(Recorder), original.__name__
    sends, waits = function.endswith("send"), not function.startswith("i")
    peer_name = "dst" if sends else "src"

    def describe(*args: Any, **kwargs: Any) -> _Call:
        group = kwargs.get("group", args[2] if len(args) > 2 else None)
        peer = kwargs.get(peer_name, args[1] if len(args) > 1 else None)
        if peer is None and kwargs.get(f"group_{peer_name}") is not None:
            peer = dist.get_process_group_ranks(group)[kwargs[f"group_{peer_name}"]]
        # A receive without a source accepts a message of any rank.
        other, rank = -1 if peer is None else int(peer), dist.get_rank()
        source, destination = (rank, other) if sends else (other, rank)
        tensors = _tensors(args[:1] or (kwargs.get("tensor"),))
        tag = kwargs.get("tag", args[3] if len(args) > 3 else 0)
        return _Call(group, function, tensors, waits, source, destination, tag)

    return lambda *args, **kwargs: recorder.run(original, describe, args, kwargs)


def stop_recording(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``destroy_process_group``: forget the group, or stop recording with the last one."""
    recorder = context.state(Recorder)

    def destroy_process_group(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if group is None or group is dist.group.WORLD:
            recorder.stop()
        elif isinstance(group, dist.ProcessGroup):
            recorder.strike(group)
        return original(group, *args, **kwargs)

    return destroy_process_group
