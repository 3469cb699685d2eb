"""What ``hang`` says of records, those of some ranks too, and how it refuses what are none."""

from __future__ import annotations

import dataclasses
import json
import time
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
    given = {"job": "a", "host": "h", "pid": 1, "time": NOW, "reason": "SIGUSR1", "lost": {}, "place": ""}
    stacks = {"main": [f"train.py:{rank} line_of_rank_{rank}: step()"]}
    return Record(rank=rank, ranks=ranks, groups=groups, **{**given, "stacks": stacks, **more})


@pytest.fixture
def said(tmp_path, capsys):
    """Write records, and return what the command prints of them."""

    def say(*records: Record) -> str:
        for each in records:
            collectives.write(tmp_path, each)
        assert main(["hang", str(tmp_path)]) == 0
        return capsys.readouterr().out

    return say


def test_a_rank_that_has_not_come(said):
    """Of two groups in a chain the cause is the rank that waits for nobody."""
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
    """What was sent and lies ready holds up nobody."""
    key, place = "1>0#2", {"source": 1, "destination": 0, "tag": 2}
    text = said(
        record(0, group((0, 1), waiting(1, "recv", **place), kind="PP", messages={key: 1})),
        record(1, group((0, 1), *[call(1, "isend", **place)] * sent, kind="PP", messages={key: sent})),
    )
    missing = "PP of ranks 0, 1: without a name (message 1 from rank 1 to rank 0, tag 2)"
    assert (missing in text) == (not sent)
    assert ("Look at rank 1 first" in text) == (not sent)


def test_records_of_some_ranks(said):
    """An asynchronous call counts, where the rank stands in a wait; who has no record has not come."""
    stacks = {"main": ["transfers.py:39 wait: work.wait()"]}
    text = said(
        record(0, group((0, 1), call(1, "all_to_all_single", waits=False, name="combine")), stacks=stacks)
    )
    assert "no record of rank 1: killed or frozen" in text
    assert "combine (all_to_all_single, number 1" in text
    assert "rank 1 has not, as far as is known: it has no record" in text
    assert "Look at rank 1 first" in text


def test_a_job_that_runs(said):
    soon = waiting(1, started=NOW - 0.1)
    text = said(record(0, group((0, 1), soon)), record(1, group((0, 1))))
    assert "No rank has waited for more than 1 s: this may be a job that runs." in text


def refusal(folder: Any, capsys: Any) -> str:
    assert main(["hang", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_folders_that_cannot_be_read(tmp_path, capsys):
    assert f"{tmp_path} has no record of a rank" in refusal(tmp_path, capsys)
    assert "nowhere is no folder" in refusal(tmp_path / "nowhere", capsys)
    collectives.write(tmp_path, record(0))
    collectives.write(tmp_path, dataclasses.replace(record(1), job="b", time=NOW - 9))
    said = refusal(tmp_path, capsys)
    assert "holds records of 2 jobs; remove those of the earlier, rank-00001.json, or" in said


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "list", "format", "missing", "binary"])
def test_damaged_files(tmp_path, capsys, damage):
    collectives.write(tmp_path, record(0, group((0, 1), call(1))))
    file = collectives.write(tmp_path, record(1, group((0, 1), call(1))))
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
