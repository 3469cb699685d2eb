"""``hang``: report the collective that a job hangs in, the ranks that called it, and all ranks' stacks."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindspeed_dsa.runs import collectives
from mindspeed_dsa.runs.collectives import Call, Record
from mindspeed_dsa.tools.hang import waits
from mindspeed_dsa.tools.hang.waits import Findings, Wait

_DESCRIPTION = """\
Reads what --record-collectives wrote on all ranks of a job that hangs, or has lost a rank: which collective
of which group it waits in, which ranks have come to it and with what, which have not, and where each of them
stands.

  torchrun ... pretrain_gpt.py ... --record-collectives runs/mine/collectives
  kill -USR1 PID     # of any of its ranks; the others answer through the folder
  python -m mindspeed_dsa hang runs/mine/collectives

Exit status: 0; 2 where the folder cannot be read as records of one job."""

_FOREIGN = (
    *("/torch/", "mindspeed_dsa/features/diagnostics/collectives/", "mindspeed_dsa/parallel/"),
    *("/threading.py", "/contextlib.py", "/typing_extensions.py"),
)
"""Path parts of library files, which are skipped when a stack is shortened to one line."""
_RUNNING_S = 1.0
"""Shortest wait, in seconds, that counts as a hang: a healthy job waits, too."""


def run(argv: Sequence[str]) -> int:
    """Print a report about the records in a folder; return the exit status."""
    options = _parse(argv)
    records = collectives.read(options.folder)
    print("\n".join(_report(records, waits.find(records), options)))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa hang",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder given to --record-collectives")
    parser.add_argument("--stacks", action="store_true", help="print the whole Python stack of every thread")
    return parser.parse_args(list(argv))


def _report(records: Sequence[Record], found: Findings, options: argparse.Namespace) -> Iterator[str]:
    first = min(records, key=lambda each: each.time)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.time))
    yield f"job {first.job}: records of {len(records)} of {first.ranks} ranks, from {written}"
    yield from _causes(records, found)
    by_rank = {record.rank: record for record in records}
    for wait in found.waits:
        yield ""
        yield from _wait(wait, by_rank, found)
    yield ""
    yield _verdict(records, found)
    yield ""
    for record in records:
        stands = "stood" if record.rank in found.silent else "stands in"
        yield f"rank {record.rank} {stands} {_standing(record)}"
        if options.stacks:
            for thread, lines in record.stacks.items():
                yield f"  thread {thread}"
                yield from (f"    {line}" for line in lines)


def _causes(records: Sequence[Record], found: Findings) -> Iterator[str]:
    for record in records:
        # A reason such as "rank 3: SIGTERM" means that another rank requested the record.
        if record.reason and not record.reason.startswith("rank "):
            yield f"rank {record.rank} wrote because of: {textwrap.shorten(record.reason, 160)}"
    if later := [record.went_on for record in records if record.went_on]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(later)))
        yield f"some ranks went on after these records, until {when}"
    if found.silent:
        ranks = f"rank{'s' * (len(found.silent) > 1)} {_list(found.silent)}"
        yield (
            f"no record of {ranks}: ended, killed or frozen, on a machine whose files are not here, or "
            "without --record-collectives"
        )


def _wait(wait: Wait, by_rank: dict[int, Record], found: Findings) -> Iterator[str]:
    yield f"{wait.group.title}: {_subject(wait)}"
    if wait.differs:
        yield f"  the ranks do not call the same: {wait.differs}"
        return
    for rank, call in wait.arrived.items():
        yield f"  rank {rank} has come: {_call(call, by_rank[rank])}"
    for rank in wait.missing:
        if rank in by_rank:
            stands = "stood" if rank in found.silent else "stands in"
            yield f"  rank {rank} has not: it {stands} {_standing(by_rank[rank])}"
        else:
            yield f"  rank {rank} has not, as far as is known: it has no record"
    if not wait.missing:
        yield "  all ranks have come, and the transfer has not ended"


def _subject(wait: Wait) -> str:
    call = wait.call
    if call is None:
        return f"call {wait.number}, older than what is kept"
    what = call.name or "without a name"
    if call.source is not None:
        source = "any rank" if call.source < 0 else f"rank {call.source}"
        return f"{what} (message {wait.number} from {source} to rank {call.destination}, tag {call.tag})"
    return f"{what} ({call.function}, number {wait.number} of the group)"


def _call(call: Call | None, record: Record) -> str:
    if call is None:
        return "its call is older than what is kept"
    tensors = ", ".join(call.tensors) or "no tensors"
    return f"{tensors}, {record.time - call.started:.1f} s before its record, from {call.line}"


def _verdict(records: Sequence[Record], found: Findings) -> str:
    last = max(record.time for record in records)
    longest = max((last - wait.since for wait in found.waits if wait.arrived), default=0.0)
    if found.failed:
        return f"It began with rank {_list(found.failed)}."
    if not found.waits and not found.first:
        return "No rank waits for another in a recorded collective: look where each of them stands."
    # Short waits are normal, unless a rank failed, paused or left no record.
    trouble = any(
        record.reason.startswith("failed") or collectives.PAUSED in record.reason for record in records
    )
    if longest < _RUNNING_S and not trouble and not found.silent:
        return f"No rank has waited for more than {_RUNNING_S:g} s: this may be a job that runs."
    if any(wait.differs for wait in found.waits):
        return "Ranks that call different collectives wait for ever: look at where their paths part."
    if not found.first:
        return "Every rank has come to what it waits for: look at the network."
    why = "others wait for it, and it waits for nobody"
    if set(found.first) <= set(found.silent):
        why = "it ended or stopped without a record"
    return f"Look at rank {_list(found.first)} first: {why}."


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _standing(record: Record) -> str:
    """Return text: a rank's position in the pipeline schedule, and its innermost own line in the stack."""
    stack = record.stacks.get("main", [])
    line = next((each for each in reversed(stack) if not any(part in each for part in _FOREIGN)), "")
    if line != (stack[-1] if stack else ""):
        line += f", inside of it {stack[-1].partition(' ')[2]}"
    return ", ".join(filter(None, (record.place, line))) or "no Python"
