"""Parts of ``make gpu`` that are about kernels alone: ways of the selection, and compute-sanitizer."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.dsa import cuda
from benchmarks.gpu import selection
from tests.ops.triton_backend import indexer, one_launch

PEAK = 1e12
WAYS = [selection.SLABS, selection.SHORT_SLABS, selection.AT_ONCE]


@pytest.fixture
def small(monkeypatch):
    """A small problem on the CPU; a call takes 4 ms, and 3 behind another one."""
    launched = []

    def seconds(call, rounds, before=None):
        launched.append((one_launch.takes_one_launch(6), indexer.SELECTED_ROWS))
        return 4e-3 if before is None else 3e-3

    monkeypatch.setattr(cuda, "seconds", seconds)
    monkeypatch.setattr(cuda, "matmul_rate", lambda rounds: PEAK)
    monkeypatch.setattr(selection, "problems", lambda quick: [selection.Sizes(6, 2, 32, 3)])
    return launched


def test_ways_of_the_selection_are_timed_beside_each_other(small):
    told = []
    found = selection.run(True, told.append, "cpu")
    assert told[-1] == found
    for name in ("S6, 2 heads, bf16", "S6, 2 heads, fp8"):
        assert list(found[name]) == WAYS
        for row in found[name].values():
            # Of the triangle of pairs, two operations for each of 2 x 32 numbers.
            rate = 6 * 7 / 2 * 2 * 2 * 32 / 3e-3
            assert row == {"ms": 4, "ms_behind": 3, "fraction_of_matmul": pytest.approx(rate / PEAK)}
    each = [(False, 4096), (False, 1024), (True, 4096)]
    assert small[::2] == small[1::2] == each * 2
    text = list(selection.words({"selection": found}))
    assert "| S6, 2 heads, fp8: one launch | 4 | 3 | 0% | 1.00 |" in text
    assert text[-1] == "One launch is never slower up to 0 keys (MEASURED_KEYS)."


@pytest.mark.full
def test_a_way_that_selects_otherwise_is_not_timed(small, monkeypatch):
    select = indexer.select_whole
    monkeypatch.setattr(indexer, "select_whole", lambda *given: (select(*given)[0] + 1, select(*given)[1]))
    found = selection.run(True, lambda _: None, "cpu")
    why = "one launch selects otherwise than slabs"
    assert found["S6, 2 heads, bf16"]["refused"] == why
    assert selection.AT_ONCE not in found["S6, 2 heads, bf16"]
    assert gpu.failures({"selection": found}) == {"selection, S6, 2 heads, bf16": why}


def test_one_launch_is_for_lengths_up_to_which_it_was_never_slower():
    def row(ratio):
        return {
            selection.SLABS: {"ms": 2.0, "ms_behind": 1.0},
            selection.AT_ONCE: {"ms": 2.0, "ms_behind": ratio},
        }

    found = {
        f"S{length}, {heads} heads, {dtype}": row(1.0)
        for length in (4096, 8192, 32768)
        for heads in selection.HEADS
        for dtype in (selection.BF16, selection.FP8)
    }
    assert selection.measured_keys(found) == 32768
    assert selection.measured_keys({**found, "S8192, 32 heads, fp8": row(1.1)}) == 4096
    assert selection.measured_keys({**found, "S4096, 64 heads, bf16": "does not fit"}) == 0


TOOL = """#!{python}
import sys
at = sys.argv.index("--log-file")
open(sys.argv[at + 1], "w").write({log!r})
assert sys.argv[at + 3 :] == ["-m", "benchmarks.gpu.sanitizer"], sys.argv
print("called: selection, bf16, slabs")
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
    assert found["calls"] == ["selection, bf16, slabs"]
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
    calls = dict(sanitizer.calls("cpu", rows=6))
    for call in calls.values():
        call()
    assert {
        "selection, fp8, one launch",
        "grouped product of one row",
        "indexer_kl_loss forward_backward, 2 heads",
    } < set(calls)
    assert torch.isfinite(calls["grouped product of one row"]()).all()
