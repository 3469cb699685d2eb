"""Search for the ranks that a hanging job waits for, in collectives and point-to-point messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_dsa.runs.collectives import PAUSED, Call, Group, Record

_SAME_SIZES = ("all_reduce", "broadcast", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
"""Collectives that need tensors of the same shapes and dtypes on all ranks of the group."""
_TIMED_OUT = ("timed out", "timeout")
BROKEN = ("connection", "socket", "broken pipe", "gloo", "nccl", "hccl", "which is lost", *_TIMED_OUT)
"""Words in errors of collectives that are the consequence of another rank's failure."""
_OF_COLLECTIVES = re.compile(r"failed with (RuntimeError|Dist\w*Error|LostNeighbourError):")
"""Errors of ``torch.distributed`` and of the library; data from a network has others."""
_OF_PIPES = re.compile(r"failed with (Connection\w*Error|BrokenPipeError):")
_DATA_LOADER = ("dataloader", "data loader")
WORKER_ENDED = "killed by signal: terminated"
"""Error of a data loader whose worker was ended by the launcher, with the job."""
_BACKWARD = "run_backward("
_FOR_DEVICE = ("synchronize(", ".item()", ".tolist()", ".cpu()", _BACKWARD)
"""Calls in which a host waits for its device."""
_INTERRUPTED = "KeyboardInterrupt"


@dataclass(frozen=True)
class Wait:
    """A collective or point-to-point message that some ranks have started and others have not.

    Attributes:
        group: process group.
        call: call as recorded by the first rank that started it; None if it is no longer in the records.
        number: index, from 1, of the collective in its group or of the message between two ranks.
        arrived: dict from rank that has started the call to its recorded call, None if it is no longer
            recorded.
        missing: ranks that have not started the call.
        since: time since which a rank has waited, in seconds since the epoch; later if its call is no longer
            recorded.
        differs: description of the different calls, if ranks called different collectives.
    """

    group: Group
    call: Call | None
    number: int
    arrived: Mapping[int, Call | None]
    missing: tuple[int, ...]
    since: float
    differs: str = ""


@dataclass(frozen=True)
class Findings:
    """Result of comparing the records of a job.

    Attributes:
        waits: calls that some rank waits in, the longest wait first.
        first: ranks that other ranks wait for and that do not wait themselves.
        failed: ranks with an error that was not caused by another rank's failure.
        silent: ranks that wrote no record although others did.
    """

    waits: tuple[Wait, ...]
    first: tuple[int, ...]
    failed: tuple[int, ...]
    silent: tuple[int, ...]


def find(records: Sequence[Record]) -> Findings:
    """Compare the collectives and messages that each rank has started.

    Args:
        records: records of one job, one per rank that wrote one.
    """
    by_rank = {record.rank: record for record in records}
    wrote = {rank for rank, record in by_rank.items() if record.reason}
    # A rank that was killed leaves its running file, but no reason: it is silent if others gave a reason.
    answered = wrote or by_rank.keys()
    silent = tuple(rank for rank in range(records[0].ranks) if rank not in answered)
    errors = {rank for rank, record in by_rank.items() if _failed(record)}
    # A broken pipe may be a download's; beside a lost rank, its end is the better guess.
    consequences = {
        rank
        for rank in errors
        if _is_broken(by_rank[rank]) or (silent and _OF_PIPES.search(by_rank[rank].reason))
    }
    failed = tuple(rank for rank in by_rank if rank in errors - consequences)
    if not failed and not silent:
        failed = _first_broken([by_rank[rank] for rank in wrote])
    waits = [*_of_collectives(by_rank), *_of_messages(by_rank)]
    waits.sort(key=lambda wait: wait.since)
    awaited = {rank for wait in waits for rank in wait.missing}
    inside = {rank for rank, record in by_rank.items() if is_waiting(record)}
    # A rank whose connection broke had waited for another one.
    waiting = (inside | consequences) - set(silent)
    # On a device a collective returns at once, and the host waits later, for the device.
    waiting |= {rank for wait in waits for rank in wait.arrived if _waits_for_device(by_rank[rank])}
    # The culprit is awaited and does not wait; else a silent rank; else, in a circle, all awaited ranks.
    first = awaited - waiting or (set(silent) if inside or errors else set()) or awaited
    # A rank may be killed while it waits in a healthy step, wherever the others are then.
    killed = [rank for rank in silent if rank in by_rank]
    if killed and _ended_before_a_hang(records):
        first = set(killed)
    return Findings(tuple(waits), tuple(sorted(first)), failed, silent)


def _first_broken(records: Sequence[Record]) -> tuple[int, ...]:
    """Return the rank whose connection broke first if no rank was ended, hung or timed out before."""
    # No rank is lost: without anything before it, the error is a cause itself.
    if any(_timed_out(record) or PAUSED in record.reason for record in records):
        return ()
    first = min(records, key=lambda record: (record.time, not _is_broken(record)), default=None)
    return (first.rank,) if first is not None and _is_broken(first) else ()


def _ended_before_a_hang(records: Sequence[Record]) -> bool:
    """Return whether the launcher or a broken connection ended a rank before any rank reported a hang."""
    ended, hung = [], [float("inf")]
    for record in records:
        if "SIGTERM" in record.reason or (_is_broken(record) and not _timed_out(record)):
            ended.append(record.time)
        elif record.reason:
            hung.append(record.time)
    return bool(ended) and min(ended) < min(hung)


def _is_broken(record: Record) -> bool:
    reason, what = record.reason.lower(), _OF_COLLECTIVES.search(record.reason)
    if WORKER_ENDED in reason:
        return True
    return what is not None and _has(reason, BROKEN) and not _has(reason, _DATA_LOADER)


def _waits_for_device(record: Record) -> bool:
    stack = record.stacks.get("main", [])
    if not stack or not _has(stack[-1], _FOR_DEVICE):
        return False
    # Autograd's thread of a device may stand in Python, while the main thread waits for it.
    in_python = any(name.startswith(("thread ", "Dummy-")) for name in record.stacks)
    return not (_BACKWARD in stack[-1] and in_python)


def _timed_out(record: Record) -> bool:
    return _has(record.reason.lower(), _TIMED_OUT)


def _has(text: str, words: Sequence[str]) -> bool:
    return any(word in text for word in words)


def is_waiting(record: Record) -> bool:
    """Return whether a rank is inside a call that waits for other ranks."""
    calls = (call for group in record.groups for call in group.calls)
    if any(call.waits and (call.returned is None or _INTERRUPTED in call.error) for call in calls):
        return True
    innermost = {thread: stack[-1] for thread, stack in record.stacks.items() if stack}
    main = innermost.pop("main", "")
    # Weights of moved experts are passed on by a thread, and the main thread waits for that.
    threads = innermost.values() if "waiter.acquire(" in main else ()
    return any(".wait(" in line for line in (main, *threads))


def _groups(by_rank: Mapping[int, Record]) -> Iterator[tuple[Group, dict[int, Group]]]:
    """Yield every process group once, with a dict from rank to that rank's record of the group."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, Group]] = {}
    for rank, record in by_rank.items():
        for group in record.groups:
            groups.setdefault((group.name, group.ranks), {})[rank] = group
    for entries in groups.values():
        # Names of a group may be known on some ranks only; ranks without any call have no entry for it.
        group = next((each for each in entries.values() if each.kinds), next(iter(entries.values())))
        never = Group(group.name, group.kinds, group.ranks, 0, {}, ())
        yield group, {rank: entries.get(rank, never) for rank in group.ranks if rank in by_rank}


def _of_collectives(by_rank: Mapping[int, Record]) -> Iterator[Wait]:
    alone: list[Wait] = []
    for group, entries in _groups(by_rank):
        absent = tuple(rank for rank in group.ranks if rank not in entries)
        counts = {rank: entry.collectives for rank, entry in entries.items()}
        least, most = min(counts.values()), max(counts.values())
        differs = _difference(entries, least)
        if differs is not None:
            call, number, arrived, text = differs
            yield Wait(group, call, number, arrived, (), _since(entries, arrived), text)
        elif most > least:
            # The next call, least + 1, is the first that some ranks have not started.
            missing = tuple(rank for rank, count in counts.items() if count == least)
            arrived = {rank: _find(entries[rank], "", least + 1) for rank in entries if counts[rank] > least}
            late = tuple(sorted((*missing, *absent)))
            yield Wait(group, _first(arrived), least + 1, arrived, late, _since(entries, arrived))
        elif most and (stuck := {rank: _find(entry, "", most) for rank, entry in entries.items()}):
            # All ranks started the last call: it is a wait if it has not ended on some rank.
            inside = [call for call in stuck.values() if call and call.waits and not _ended(call)]
            if inside:
                yield Wait(group, inside[0], most, stuck, absent, _since(entries, stuck))
            elif absent and any(is_waiting(by_rank[rank]) or _failed(by_rank[rank]) for rank in entries):
                alone.append(Wait(group, _first(stuck), most, stuck, absent, _since(entries, stuck)))
    if alone:
        # Whether an asynchronous call has ended is only known when it is waited for, so only the last call
        # counts.
        yield max(alone, key=lambda wait: wait.since)


def _since(entries: Mapping[int, Group], arrived: Mapping[int, Call | None]) -> float:
    """Return when the first of the ranks that have come did so, at the latest."""
    # A call that is no longer kept is older than all kept calls.
    starts = (
        [call.started] if call is not None else [kept.started for kept in entries[rank].calls]
        for rank, call in arrived.items()
    )
    return min((start for each in starts for start in each), default=0.0)


def _ended(call: Call) -> bool:
    return call.returned is not None and not call.error


def _failed(record: Record) -> bool:
    return record.reason.startswith("failed") and _INTERRUPTED not in record.reason


def _difference(
    known: Mapping[int, Group], least: int
) -> tuple[Call, int, dict[int, Call | None], str] | None:
    """Return the group's first collective in which ranks called different functions or passed other tensors.

    Returns:
        a rank's call, its number, the calls by rank, and a description; None if all calls agree.
    """
    calls = {
        rank: {call.number: call for call in each.calls if call.source is None}
        for rank, each in known.items()
    }
    # Only the last calls are kept, of millions in a long job.
    for number in sorted({number for by_number in calls.values() for number in by_number if number <= least}):
        same_number = {rank: by_number[number] for rank, by_number in calls.items() if number in by_number}
        if len(same_number) < 2:
            continue
        ways = {
            rank: call.function + (" of " + ", ".join(call.tensors) if call.function in _SAME_SIZES else "")
            for rank, call in same_number.items()
        }
        if len(set(ways.values())) > 1:
            text = "; ".join(f"rank {rank} called {way}" for rank, way in ways.items())
            return next(iter(same_number.values())), number, dict(same_number), text
    return None


def _find(group: Group, key: str, number: int) -> Call | None:
    """Return a recorded call by :attr:`Call.key` and number; None if it is no longer recorded."""
    return next((call for call in group.calls if call.key == key and call.number == number), None)


def _first(calls: Mapping[int, Call | None]) -> Call | None:
    return next((call for call in calls.values() if call is not None), None)


def _of_messages(by_rank: Mapping[int, Record]) -> Iterator[Wait]:
    for group, known_groups in _groups(by_rank):
        keys = sorted({key for each in known_groups.values() for key in each.messages})
        for key in keys:
            # A key is "source>destination#tag".
            source, destination = (int(part) for part in key.partition("#")[0].split(">"))
            if source not in group.ranks or destination not in group.ranks:
                continue
            sent, received = (
                known_groups[rank].messages.get(key, 0) if rank in known_groups else 0
                for rank in (source, destination)
            )
            if sent == received:
                continue
            here, there = (destination, source) if received > sent else (source, destination)
            if here not in known_groups:
                continue
            number = min(sent, received) + 1
            call = _find(known_groups[here], key, number)
            # A message that is not received yet does not block its sender, unless the sender waits or failed.
            if received < sent and not (is_waiting(by_rank[here]) or _failed(by_rank[here])):
                continue
            since = call.started if call is not None else _since(known_groups, {here: None})
            yield Wait(group, call, number, {here: call}, (there,), since)
