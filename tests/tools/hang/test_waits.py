"""Output of ``hang`` for records, also of some ranks only, and its refusal of other files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.runs import collectives
from mindspeed_dsa.runs.collectives import Call, Group, Record

NOW = time.time()


def call(number: int, function: str = "all_reduce", **more: Any) -> Call:
    given = {"tensors": ("[4] float32",), "name": "", "line": "train.py:7 step", "started": NOW - 60 + number}
    return Call(function, number, **{**given, "returned": NOW - 60 + number, "waits": True, **more})


def waiting(number: int, function: str = "all_reduce", **more: Any) -> Call:
    return call(number, function, **{"returned": None, **more})


def group(ranks: tuple[int, ...], *calls: Call, kind: str = "TP", messages: Any = None) -> Group:
    count = max((each.number for each in calls if each.source is None), default=0)
    return Group("-".join(map(str, ranks)), (kind,), ranks, count, dict(messages or {}), calls)


def record(rank: int, *groups: Group, ranks: int = 2, **more: Any) -> Record:
    given = {"job": "a", "host": "h", "pid": 1, "time": NOW, "reason": "SIGUSR1", "place": ""}
    stacks = {"main": [f"train.py:{rank} line_of_rank_{rank}: step()"]}
    return Record(rank=rank, ranks=ranks, groups=groups, **{**given, "stacks": stacks, **more})


def write(folder: Path, each: Record) -> Path:
    file = collectives.record_file(folder, each.rank)
    collectives.write(file, each)
    return file


@pytest.fixture
def said(tmp_path, capsys):
    """Return a function that writes records and returns the command's output for them."""

    def say(*records: Record) -> str:
        for each in records:
            write(tmp_path, each)
        assert main(["hang", str(tmp_path)]) == 0
        return capsys.readouterr().out

    return say


def test_a_rank_that_has_not_come(said):
    """Of two groups in a chain, the cause is the rank that waits for no other."""
    text = said(
        record(
            0, group((0, 1), call(1), waiting(2, name="dispatch of layer 3, microbatch 5, forward")), ranks=3
        ),
        record(1, group((0, 1), call(1)), group((1, 2), waiting(1), kind="PP"), ranks=3),
        record(2, ranks=3),
    )
    assert "TP of ranks 0, 1: dispatch of layer 3, microbatch 5, forward (all_reduce, number 2 of the" in text
    assert "  rank 0 has come: [4] float32, 58.0 s before its record, from train.py:7 step" in text
    assert "  rank 1 has not: it stands in train.py:1 line_of_rank_1" in text
    assert "PP of ranks 1, 2: " in text
    assert "Look at rank 2 first: others wait for it, and it waits for nobody." in text


def test_different_calls(said):
    text = said(
        record(0, group((0, 1), call(1), waiting(2, "all_gather"))),
        record(1, group((0, 1), call(1), waiting(2, "barrier"))),
    )
    assert "the ranks do not call the same: rank 0 called all_gather; rank 1 called barrier" in text
    assert "Ranks that call different collectives wait for ever" in text


def test_different_sizes(said):
    calls = (waiting(1, tensors=(f"[{size}] float32",)) for size in (4, 5))
    text = said(*(record(rank, group((0, 1), each)) for rank, each in enumerate(calls)))
    assert "rank 0 called all_reduce of [4] float32; rank 1 called all_reduce of [5] float32" in text


def test_all_have_come(said):
    text = said(*(record(rank, group((0, 1), waiting(1))) for rank in (0, 1)))
    assert "all ranks have come, and the transfer has not ended" in text
    assert "look at the network" in text


@pytest.mark.parametrize("sent", [0, 1])
def test_messages(said, sent):
    """A message that has been sent holds up no rank."""
    key, place = "1>0#2", {"source": 1, "destination": 0, "tag": 2}
    text = said(
        record(0, group((0, 1), waiting(1, "recv", **place), kind="PP", messages={key: 1})),
        record(1, group((0, 1), *[call(1, "isend", **place)] * sent, kind="PP", messages={key: sent})),
    )
    missing = "PP of ranks 0, 1: without a name (message 1 from rank 1 to rank 0, tag 2)"
    assert (missing in text) == (not sent)
    assert ("Look at rank 1 first" in text) == (not sent)


def test_records_of_some_ranks(said):
    """An asynchronous call counts where the rank waits for it; a rank without a record has not come."""
    stacks = {"main": ["transfers.py:39 wait: work.wait()"]}
    text = said(
        record(0, group((0, 1), call(1, "all_to_all_single", waits=False, name="combine")), stacks=stacks)
    )
    assert "no record of rank 1: ended, killed or frozen" in text
    assert "combine (all_to_all_single, number 1" in text
    assert "rank 1 has not, as far as is known: it has no record" in text
    assert "Look at rank 1 first" in text


@pytest.mark.parametrize(
    "innermost", ["chains.py:192 _finish: work.wait()", "files.py:7 write: os.fsync(file)"]
)
def test_a_rank_that_waits_for_a_thread_waits_where_the_thread_does(said, innermost):
    """Rank 1 waits for rank 0 in a thread, and rank 2 for rank 1."""
    main = ["chains.py:281 wait: done.wait()", "threading.py:359 wait: waiter.acquire()"]
    places = {f"{rank}>{rank + 1}#0": {"source": rank, "destination": rank + 1} for rank in range(2)}
    text = said(
        record(0, group((0, 1, 2)), ranks=3),
        *(
            record(
                rank + 1,
                group((0, 1, 2), call(1, "irecv", waits=False, **place), messages={key: 1}),
                ranks=3,
                stacks={"main": main, "chains of ranks": [innermost]},
            )
            for rank, (key, place) in enumerate(places.items())
        ),
    )
    culprits = "0" if "wait" in innermost else "0, 1"
    assert f"Look at rank {culprits} first" in text


def test_a_rank_that_failed_since_another_is_lost_is_no_cause(said):
    """Rank 0 is lost, rank 1 has waited for it, and rank 2 for rank 1."""
    places = {f"{rank}>{rank + 1}#0": {"source": rank, "destination": rank + 1} for rank in range(2)}
    text = said(
        *(
            record(
                rank + 1,
                group((0, 1, 2), call(1, "irecv", waits=False, **place), messages={key: 1}),
                ranks=3,
                reason="failed with RuntimeError: weights of expert 3: Connection closed by peer",
            )
            for rank, (key, place) in enumerate(places.items())
        )
    )
    assert "no record of rank 0: ended, killed or frozen" in text
    assert "Look at rank 0 first" in text


def test_a_job_that_runs(said):
    soon = waiting(1, started=NOW - 0.1)
    text = said(record(0, group((0, 1), soon)), record(1, group((0, 1))))
    assert "No rank has waited for more than 1 s: this may be a job that runs." in text


def live(folder: Path, rank: int, *calls: Call) -> None:
    """Write the files of a rank that wrote no record."""
    file = collectives.live_file(folder, rank)
    collectives.write(file, record(rank, reason="", stacks={}, time=NOW - 99))
    collectives.list_group(file, group((0, 1)))
    collectives.list_group(file, group((1, 2)))
    collectives.strike_group(file, "1-2")
    written = collectives.Calls(file.with_suffix(".calls"))
    for entry in calls:
        words = (entry.source, entry.destination, entry.tag, entry.name, entry.line)
        text = collectives.in_words("0-1", entry.function, entry.tensors, entry.waits, *words)
        place = written.start(int(entry.source is not None), entry.number, entry.started, text)
        if entry.returned is not None:
            written.end(place, entry.returned, entry.error)


def test_the_last_calls_of_a_rank_that_wrote_nothing(tmp_path, said):
    """They include killed ranks, and half of a call is no call."""
    message = waiting(3, "recv", source=0, destination=1, tag=2)
    live(tmp_path, 1, *(call(number, name=f"number {number}") for number in range(1, 200)), message)
    calls = collectives.live_file(tmp_path, 1).with_suffix(".calls")
    half = 70 % 64 * 640  # the 70th has been overwritten by a younger one
    calls.write_bytes(calls.read_bytes()[: half + 200] + bytes(440) + calls.read_bytes()[half + 640 :])
    text = said(record(0, group((0, 1), call(199), waiting(200, name="dispatch of layer 3"))))
    assert "no record of rank 1: ended, killed or frozen" in text
    assert "TP of ranks 0, 1: dispatch of layer 3 (all_reduce, number 200 of the group)" in text
    assert "rank 1 has not: it stood after number 199" in text
    assert "Look at rank 1 first" in text
    (restored,) = collectives.with_calls([group((0, 1))], calls)
    assert restored.collectives == 199
    assert restored.messages == {"0>1#2": 3}
    assert len(restored.calls) == 64


@pytest.mark.parametrize(
    ("reason", "culprit"),
    [
        ("SIGTERM", 1),
        ("rank 2: SIGTERM", 1),
        ("failed with RuntimeError: Connection closed by peer", 1),
        ("SIGUSR1", 0),
        ("no collective has started or ended for 120 s", 0),
    ],
)
def test_a_rank_that_is_killed_while_it_waits(tmp_path, said, reason, culprit):
    """Rank 0 still computes when the launcher ends it. In a hang, it is what rank 1 waits for."""
    live(tmp_path, 1, call(1), waiting(2))
    text = said(record(0, group((0, 1), call(1)), reason=reason))
    assert f"Look at rank {culprit} first" in text


def test_a_time_out_after_a_hang(tmp_path, said):
    """Rank 1 has waited for rank 0 until NCCL aborted it, and so has rank 2."""
    live(tmp_path, 1, call(1), waiting(2))
    text = said(
        record(0, group((0, 1), call(1)), reason="SIGTERM", ranks=3),
        record(2, reason="failed with DistBackendError: Watchdog caught collective timeout", ranks=3),
    )
    assert "Look at rank 0 first" in text


def test_long_names_have_room():
    text = collectives.in_words(
        "g" * 40, "all_to_all", ("[1] float32",) * 99, True, None, None, 0, "n" * 999, "行" * 999
    )
    assert len(text) == collectives._TEXT
    assert json.loads(text.rstrip(b"\0"))[:2] == ["g" * 40, "all_to_all"]


@pytest.mark.parametrize("asked_again", [True, False])
def test_a_rank_that_goes_on_after_its_record_and_is_killed(tmp_path, said, asked_again):
    live(tmp_path, 1, call(1), call(2, started=NOW + 5, returned=NOW + 6))
    late = record(0, group((0, 1), call(1), call(2), waiting(3)), time=NOW + 60 * asked_again)
    text = said(late, record(1, group((0, 1), call(1))))
    assert ("no record of rank 1" in text) == asked_again
    assert ("rank 1 stood after all_reduce" in text) == asked_again


def test_the_newest_job_with_a_record_is_read(tmp_path, capsys):
    """A restarted job records anew, and has nothing to report yet."""
    for job, reason in (("a", "SIGUSR1"), ("b", "failed with ValueError: a bad batch"), ("c", "")):
        (tmp_path / job).mkdir()
        write(tmp_path / job, record(0, job=job, reason=reason, ranks=1))
    assert main(["hang", str(tmp_path)]) == 0
    assert "It began with rank 0" in capsys.readouterr().out
    assert main(["hang", str(tmp_path / "a")]) == 0
    assert "because of: SIGUSR1" in capsys.readouterr().out


def refusal(folder: Any, capsys: Any) -> str:
    assert main(["hang", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_folders_that_cannot_be_read(tmp_path, capsys):
    assert f"{tmp_path} has no record of a rank" in refusal(tmp_path, capsys)
    assert "nowhere is no folder" in refusal(tmp_path / "nowhere", capsys)


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "list", "format", "missing", "binary"])
def test_damaged_files(tmp_path, capsys, damage):
    write(tmp_path, record(0, group((0, 1), call(1))))
    file = write(tmp_path, record(1, group((0, 1), call(1))))
    text = file.read_text()
    data = json.loads(text)
    damaged = {
        "cut": text[: len(text) // 2],
        "empty": "",
        "foreign": '{"step": 3}',
        "list": "[1, 2]",
        "format": json.dumps({**data, "format": 0}),
        "missing": json.dumps({name: value for name, value in data.items() if name != "stacks"}),
        "binary": "\0\1\2",
    }
    file.write_text(damaged[damage])
    assert f"{file} is cut short or no record of collectives (" in refusal(tmp_path, capsys)


def test_a_pause_of_hours_ago_is_not_the_end(tmp_path, said):
    """Rank 1 was killed, and the launcher ended rank 0. Both had written records in an early pause."""
    for rank in range(2):
        live(tmp_path, rank, call(1), call(2, started=NOW - 1 + rank / 2, returned=None if rank else NOW - 1))
    stack = 'Stack (most recent call first):\n  File "train.py", line 7 in step\n'
    collectives.live_file(tmp_path, 0).with_suffix(".SIGTERM").write_text(stack)
    early = [
        record(rank, group((0, 1), call(1)), reason=f"{collectives.PAUSED} for 120 s", time=NOW - 9000)
        for rank in range(2)
    ]
    text = said(*early)
    assert "rank 0 wrote because of: SIGTERM" in text
    assert "rank 0 stands in after all_reduce, train.py:7 step" in text
    assert "Look at rank 1 first: it ended or stopped without a record." in text


def test_a_pause_before_all_were_killed(tmp_path, said):
    for rank in range(2):
        live(tmp_path, rank, call(1), call(2, started=NOW))
    text = said(*(record(rank, group((0, 1), call(1)), time=NOW - 9000) for rank in range(2)))
    assert "some ranks went on after these records, until 2" in text


def test_hosts_that_wait_for_their_devices(said):
    """NCCL's receives have returned, and the hosts of pipeline ranks 0 to 2 wait for the next rank."""
    names = [{"source": rank + 1, "destination": rank} for rank in range(3)]
    waits = {"main": ["torch/cuda/__init__.py:1 synchronize: return torch._C._cuda_synchronize()"]}
    ranks = [
        record(
            rank,
            group((0, 1, 2, 3), call(1, "irecv", waits=False, **place), messages={f"{rank + 1}>{rank}#0": 1}),
            ranks=4,
            stacks=waits,
        )
        for rank, place in enumerate(names)
    ]
    assert "Look at rank 3 first" in said(*ranks, record(3, group((0, 1, 2, 3)), ranks=4, stacks=waits))


def test_a_job_of_several_machines_whose_launchers_do_not_know_of_each_other(tmp_path, said):
    """Rank 1 is killed, its launcher ends rank 0, and the other machine's ranks wait on."""
    live(tmp_path, 1, call(1), waiting(2))
    rest = [
        record(rank, group((0, rank), waiting(1)), reason=f"{collectives.PAUSED} for 120 s", ranks=4)
        for rank in (2, 3)
    ]
    ended = record(0, group((0, 1), call(1)), reason="SIGTERM", time=NOW - 119, ranks=4)
    assert "Look at rank 1 first" in said(ended, *rest)


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: DataLoader timed out after 60 seconds",
        "ConnectionError: HTTPSConnectionPool: Max retries exceeded",
        "ValueError: no file nccl/gloo.bin",
        "RuntimeError: Connection reset by peer",
    ],
)
def test_an_error_while_all_others_live_is_the_cause(said, error):
    text = said(
        record(0, group((0, 1), waiting(1)), reason="SIGTERM"),
        record(1, group((0, 1)), reason=f"failed with {error}"),
    )
    assert "It began with rank 1." in text


@pytest.mark.parametrize(
    ("earlier", "after_s", "reason"),
    [
        ("failed with RuntimeError: Timed out waiting 1800000ms for recv", -1, "RuntimeError"),
        (f"{collectives.PAUSED} for 120 s", 1, "DistBackendError"),
        ("SIGTERM", -1, "RuntimeError"),
    ],
)
def test_a_connection_that_breaks_after_something_else_is_no_cause(said, earlier, after_s, reason):
    text = said(
        record(0, group((0, 1, 2)), ranks=3, reason="SIGTERM", time=NOW + 2),
        record(1, group((0, 1, 2), call(1, error="x")), ranks=3, reason=earlier, time=NOW + after_s),
        record(2, group((0, 1, 2), waiting(1)), ranks=3, reason=f"failed with {reason}: Connection closed"),
    )
    assert "It began with" not in text


def test_a_broken_pipe_beside_a_killed_rank(tmp_path, said):
    live(tmp_path, 0, call(1))
    text = said(record(1, group((0, 1), waiting(2)), reason="failed with BrokenPipeError: [Errno 32]"))
    assert "Look at rank 0 first" in text


def test_a_backward_that_stands_in_python_does_not_wait(said):
    """Autograd runs it in a thread of the device, and the main thread waits for that."""
    place = {"source": 3, "destination": 2, "tag": 0}
    main = {"main": ["graph.py:1 _engine_run_backward: return run_backward()"]}
    text = said(
        record(2, group((2, 3), waiting(1, "recv", **place), messages={"3>2#0": 1}), ranks=4),
        record(
            3,
            group((2, 3), call(1, "irecv", waits=False, source=2, destination=3), messages={"2>3#0": 1}),
            ranks=4,
            stacks={**main, "Dummy-1": ["job.py:3 backward: sleep()"]},
        ),
        record(0, ranks=4),
        record(1, ranks=4),
    )
    assert "Look at rank 3 first" in text


def test_ctrl_c_in_a_hang_is_no_cause(said):
    reason = "failed with KeyboardInterrupt: "
    text = said(
        record(0, group((0, 1), call(1, error="KeyboardInterrupt: ")), reason=reason),
        record(1, group((0, 1)), reason=reason),
    )
    assert "Look at rank 1 first" in text


def test_a_host_far_ahead_of_a_hang(said):
    """The call that rank 1 has not started is older than all calls that are kept."""
    kept = [call(number, started=NOW - 90) for number in range(100, 164)]
    text = said(
        record(0, group((0, 1), *kept), reason=f"{collectives.PAUSED} for 120 s"),
        record(1, group((0, 1), call(50))),
    )
    assert "call 51, older than what is kept" in text
    assert "Look at rank 1 first" in text


def test_millions_of_calls_are_compared_by_those_that_are_kept(said):
    """A loop over all calls would take days."""
    text = said(*(record(rank, group((0, 1), waiting(10**12))) for rank in range(2)))
    assert "number 1000000000000 of the group" in text


def test_a_damaged_job_of_the_past_is_not_read(tmp_path, capsys):
    for job in "ab":
        (tmp_path / job).mkdir()
    collectives.record_file(tmp_path / "a", 0).write_text("{")
    write(tmp_path / "b", record(0, job="b", ranks=1))
    assert main(["hang", str(tmp_path)]) == 0
    assert "job b" in capsys.readouterr().out
