"""Who waits for whom: collectives that not all ranks of a group have started, messages that nobody sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_dsa.runs.collectives import Call, Group, Record

_SAME_SIZES = ("all_reduce", "broadcast", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
"""Collectives that every rank of the group calls with tensors of the same shapes and dtypes."""
BROKEN = (
    *("connection", "socket", "broken pipe", "gloo", "nccl", "hccl", "timed out", "timeout", "which is lost"),
    "killed by signal: terminated",  # a data loader's worker, by who ends the job
)
"""Words in errors of a rank that is not to blame."""


@dataclass(frozen=True)
class Wait:
    """A collective or a message that some ranks have come to and others have not.

    Attributes:
        group: in which it is.
        call: what it is, as the first who came has it; ``None`` if it is older than what is kept.
        number: of it in the group, or among its messages.
        arrived: by rank, its own call; ``None`` if that is older than what is kept.
        missing: ranks that have not come.
        differs: in words, what ranks have called instead of the same.
    """

    group: Group
    call: Call | None
    number: int
    arrived: Mapping[int, Call | None]
    missing: tuple[int, ...]
    differs: str = ""


@dataclass(frozen=True)
class Findings:
    """Result of comparing the records of a job.

    Attributes:
        waits: the longest first.
        first: ranks that others wait for, and that wait for nobody themselves.
        failed: ranks whose error is no other rank's doing.
        silent: ranks that wrote no record, where others did.
    """

    waits: tuple[Wait, ...]
    first: tuple[int, ...]
    failed: tuple[int, ...]
    silent: tuple[int, ...]


def find(records: Sequence[Record]) -> Findings:
    """Compare what all ranks have started.

    Args:
        records: of one job, one for each rank that wrote one.
    """
    by_rank = {record.rank: record for record in records}
    wrote = {rank for rank, record in by_rank.items() if record.reason}
    answered = wrote or by_rank.keys()
    silent = tuple(rank for rank in range(records[0].ranks) if rank not in answered)
    failed = tuple(rank for rank, record in by_rank.items() if _failed(record) and not _is_broken(record))
    waits = [*_of_collectives(by_rank), *_of_messages(by_rank)]
    waits.sort(key=lambda wait: _since(wait))
    awaited = {rank for wait in waits for rank in wait.missing}
    waiting = {rank for rank, record in by_rank.items() if rank not in silent and is_waiting(record)}
    stuck = any(is_waiting(record) or _failed(record) for record in by_rank.values())
    first = tuple(sorted(awaited - waiting)) or (silent if stuck else ()) or tuple(sorted(awaited))
    return Findings(tuple(waits), first, failed, silent)


def _is_broken(record: Record) -> bool:
    return any(word in record.reason.lower() for word in BROKEN)


def is_waiting(record: Record) -> bool:
    """Return whether a rank stands in a call that waits for others."""
    calls = (call for group in record.groups for call in group.calls)
    if any(call.waits and call.returned is None for call in calls):
        return True
    stack = record.stacks.get("main", [])
    return bool(stack) and ".wait(" in stack[-1]


def _since(wait: Wait) -> float:
    return min((call.started for call in wait.arrived.values() if call is not None), default=0.0)


def _groups(by_rank: Mapping[int, Record]) -> Iterator[tuple[Group, dict[int, Group]]]:
    """Yield every group as one of its ranks has it, and as each rank that wrote a record has it."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, Group]] = {}
    for rank, record in by_rank.items():
        for group in record.groups:
            found.setdefault((group.name, group.ranks), {})[rank] = group
    for known in found.values():
        group = next((each for each in known.values() if each.kinds), next(iter(known.values())))
        never = Group(group.name, group.kinds, group.ranks, 0, {}, ())
        yield group, {rank: known.get(rank, never) for rank in group.ranks if rank in by_rank}


def _of_collectives(by_rank: Mapping[int, Record]) -> Iterator[Wait]:
    alone: list[Wait] = []
    for group, known in _groups(by_rank):
        absent = tuple(rank for rank in group.ranks if rank not in known)
        counts = {rank: each.collectives for rank, each in known.items()}
        least, most = min(counts.values()), max(counts.values())
        differs = _difference(known, least)
        if differs is not None:
            yield Wait(group, *differs)
        elif most > least:
            missing = tuple(rank for rank, count in counts.items() if count == least)
            arrived = {rank: _collective(known[rank], least + 1) for rank in known if counts[rank] > least}
            yield Wait(group, _first(arrived), least + 1, arrived, tuple(sorted((*missing, *absent))))
        elif most and (stuck := {rank: _collective(each, most) for rank, each in known.items()}):
            inside = [call for call in stuck.values() if call and call.waits and not _ended(call)]
            if inside:
                yield Wait(group, inside[0], most, stuck, absent)
            elif absent and any(is_waiting(by_rank[rank]) or _failed(by_rank[rank]) for rank in known):
                alone.append(Wait(group, _first(stuck), most, stuck, absent))
    if alone:
        # Nobody knows what became of an asynchronous call but the rank that waits for it: the last one.
        yield max(alone, key=_since)


def _ended(call: Call) -> bool:
    return call.returned is not None and not call.error


def _failed(record: Record) -> bool:
    return record.reason.startswith("failed")


def _difference(
    known: Mapping[int, Group], least: int
) -> tuple[Call, int, dict[int, Call | None], tuple[int, ...], str] | None:
    """Return the first collective of a group that ranks called in different ways."""
    calls = {
        rank: {call.number: call for call in each.calls if call.source is None}
        for rank, each in known.items()
    }
    for number in range(1, least + 1):
        found = {rank: own[number] for rank, own in calls.items() if number in own}
        if len(found) < 2:
            continue
        ways = {
            rank: call.function + (" of " + ", ".join(call.tensors) if call.function in _SAME_SIZES else "")
            for rank, call in found.items()
        }
        if len(set(ways.values())) > 1:
            text = "; ".join(f"rank {rank} called {way}" for rank, way in ways.items())
            return next(iter(found.values())), number, dict(found), (), text
    return None


def _collective(group: Group, number: int) -> Call | None:
    return next((call for call in group.calls if call.source is None and call.number == number), None)


def _first(calls: Mapping[int, Call | None]) -> Call | None:
    return next((call for call in calls.values() if call is not None), None)


def _of_messages(by_rank: Mapping[int, Record]) -> Iterator[Wait]:
    for group, known in _groups(by_rank):
        keys = sorted({key for each in known.values() for key in each.messages})
        for key in keys:
            source, destination = (int(part) for part in key.partition("#")[0].split(">"))
            if source not in group.ranks or destination not in group.ranks:
                continue
            sent, received = (
                known[rank].messages.get(key, 0) if rank in known else 0 for rank in (source, destination)
            )
            if sent == received:
                continue
            here, there = (destination, source) if received > sent else (source, destination)
            if here not in known:
                continue
            number = min(sent, received) + 1
            call = _message(known[here], key, number)
            # What was sent and lies ready is no reason to wait, unless its sender does.
            if received < sent and not (is_waiting(by_rank[here]) or _failed(by_rank[here])):
                continue
            yield Wait(group, call, number, {here: call}, (there,))


def _message(group: Group, key: str, number: int) -> Call | None:
    return next(
        (
            call
            for call in group.calls
            if call.source is not None
            and f"{call.source}>{call.destination}#{call.tag}" == key
            and call.number == number
        ),
        None,
    )
