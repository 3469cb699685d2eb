"""Kernel parts of ``make gpu``: variants of the selection and the backward, and compute-sanitizer."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.dsa import cuda
from benchmarks.gpu import backward, selection
from tests.ops.triton_backend import attention, hopper, indexer

PEAK = 1e12
WAYS = [selection.SLABS, selection.SHORT_SLABS]


@pytest.fixture
def small(monkeypatch):
    """Make a small problem on the CPU; a call takes 4 ms, or 3 ms right after another call."""
    launched = []

    def seconds(call, rounds, before=None):
        launched.append(indexer.SELECTED_ROWS)
        return 4e-3 if before is None else 3e-3

    monkeypatch.setattr(cuda, "seconds", seconds)
    monkeypatch.setattr(cuda, "matmul_rate", lambda rounds: PEAK)
    monkeypatch.setattr(selection, "problems", lambda quick: [selection.Sizes(6, 2, 32, 3)])
    return launched


def test_ways_of_the_selection_are_timed_beside_each_other(small):
    told = []
    result = selection.run(True, told.append, "cpu")
    assert told[-1] == result
    for name in ("S6, 2 heads, bf16", "S6, 2 heads, fp8"):
        assert list(result[name]) == WAYS
        for row in result[name].values():
            # The pairs form a triangle, with two operations for each of 2 x 32 numbers.
            rate = 6 * 7 / 2 * 2 * 2 * 32 / 3e-3
            assert row == {"ms": 4, "ms_behind": 3, "fraction_of_matmul": pytest.approx(rate / PEAK)}
    assert small[::2] == small[1::2] == [4096, 1024] * 2
    text = list(selection.words({"selection": result}))
    assert "| S6, 2 heads, fp8: slabs of 1024 rows | 4 | 3 | 0% | 1.00 |" in text


@pytest.mark.full
def test_a_way_that_selects_otherwise_is_not_timed(small, monkeypatch):
    select = indexer.select_by

    def select_by(*given):
        indices, scores = select(*given)
        return indices + (indexer.SELECTED_ROWS == 1024), scores

    monkeypatch.setattr(indexer, "select_by", select_by)
    result = selection.run(True, lambda _: None, "cpu")
    why = "slabs of 1024 rows selects otherwise than slabs"
    assert result["S6, 2 heads, bf16"]["refused"] == why
    assert selection.SHORT_SLABS not in result["S6, 2 heads, bf16"]
    assert gpu.failures({"selection": result}) == {"selection, S6, 2 heads, bf16": why}


@pytest.mark.full
def test_the_backward_is_timed_by_rows_and_by_tiles(small, monkeypatch):
    taken = []

    def seconds(*_):
        taken.append((hopper.prefers_rows(2, False), torch.are_deterministic_algorithms_enabled()))
        return 4e-3

    monkeypatch.setattr(cuda, "seconds", seconds)
    result = backward.run(True, lambda _: None, "cpu")
    name, _ = result
    assert taken == [(False, False), (True, False), (False, True), (True, True)]
    assert result[name][backward.TILES] == result[name][backward.ROWS] == 4
    assert f"| {name} | 4 | 4 | 1.00 |" in list(backward.words({"backward": result}))
    monkeypatch.setattr(backward.Problem, "apart", lambda *_: float(hopper.prefers_rows(2, False)))
    result = backward.run(True, lambda _: None, "cpu")
    why = "by rows differs by 1.0e+00 from the operator's own"
    assert [row["refused"] for row in result.values()] == [why, why]
    assert backward.ROWS not in result[name]
    assert gpu.failures({"backward": {name: result[name]}}) == {f"backward, {name}": why}
    assert list(backward.words({"backward": result})) == []


TOOL = """#!{python}
import sys
at = sys.argv.index("--log-file")
open(sys.argv[at + 1], "w").write({log!r})
assert sys.argv[1:at] == ["--tool", "memcheck", "--report-api-errors", "no"], sys.argv
assert sys.argv[at + 3 :] == ["-m", "benchmarks.gpu.sanitizer"], sys.argv
print("called: selection, bf16")
sys.exit({code})
"""
WRONG = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at select_kernel+0x1230 in triton_selection.py:130
=========     at 0x40 in forward_kernel
========= ERROR SUMMARY: 2 errors
"""


@pytest.mark.parametrize(
    ("log", "code", "failure"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0, None),
        (WRONG, 0, "2 wrong accesses, in select_kernel, forward_kernel"),
        ("", 3, "compute-sanitizer did not come to its summary: it exited with 3: "),
    ],
)
def test_wrong_accesses_fail_with_their_kernels(log, code, failure, tmp_path, monkeypatch):
    from benchmarks.gpu import sanitizer

    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / sanitizer.TOOL
    tool.write_text(TOOL.format(python=sys.executable, log=log, code=code))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = sanitizer.run(tmp_path, 60.0)
    assert found["calls"] == ["selection, bf16"]
    assert gpu.failures({"sanitizer": found}) == ({"sanitizer": failure} if failure else {})


def test_without_the_tool_the_report_says_so(tmp_path, monkeypatch):
    from benchmarks.gpu import sanitizer, words

    monkeypatch.setenv("PATH", str(tmp_path))
    found = {"sanitizer": sanitizer.run(tmp_path, 60.0), "slower_than_model": "-", "failed": {}}
    assert gpu.failures(found) == {}
    assert "Accesses: compute-sanitizer is not on PATH: no access was checked." in words.report(found, "H100")


@pytest.mark.full
def test_every_call_under_the_tool_can_be_made(monkeypatch):
    from benchmarks.gpu import sanitizer

    monkeypatch.setattr(sanitizer, "HEADS", (2,))
    monkeypatch.setattr(sanitizer, "_SIZES", {"index_heads": 2, "topk": 4})
    ways = []

    def delta(*tensors):
        ways.append((hopper.prefers_rows(2, False), torch.are_deterministic_algorithms_enabled()))
        return original(*tensors)

    original = attention._delta
    monkeypatch.setattr(attention, "_delta", delta)
    calls = dict(sanitizer.calls("cpu", rows=6))
    for call in calls.values():
        call()
    tiles, rows = False, True
    assert ways == [(tiles, False), (tiles, True), (rows, False), (rows, True), (tiles, False)]
    assert {
        "selection, fp8",
        "grouped product of one row",
        "indexer_kl_loss forward_backward, 2 heads",
        "sparse_flash_attention backward by rows, in a fixed order, 2 heads",
    } < set(calls)
    assert torch.isfinite(calls["grouped product of one row"]()).all()
