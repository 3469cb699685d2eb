"""Other projects' sparse attention compared with ours on one problem; text and picture of the result."""

from __future__ import annotations

import json
import math
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import gpu
from benchmarks.dsa import cuda
from benchmarks.dsa.problem import Sizes
from benchmarks.gpu import beside, projects, rivals
from benchmarks.gpu.projects import PROJECTS, Problem, Project
from benchmarks.gpu.rivals import Cell
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention

SIZES = Sizes(length=24, heads=2, topk=8)
PEAK = 1e12
KINDS = [{}, {"full": True}, {"shared": 0.5, "ascending": False}]


def attend(query, key_value, indices, scale):
    return sparse_flash_attention(query, key_value, indices, scale, value_dim=512)


def gradients(query, key_value, indices, scale, grad):
    leaves = [each.clone().requires_grad_() for each in (query, key_value)]
    return torch.autograd.grad(attend(*leaves, indices, scale).out, leaves, grad)


@pytest.fixture
def elsewhere(monkeypatch):
    """Replace all projects' functions by ours; layouts and conventions have to arrive intact."""

    def within(indices, lengths):
        """Mask the indices beyond a row's length."""
        if lengths is None:
            assert (indices >= 0).all()
            return indices
        place = torch.arange(indices.shape[-1])
        return torch.where(place < lengths[:, None], indices, -1)

    def up_to_row(indices, first=0):
        assert (indices >= 0).all()
        row = first + torch.arange(indices.shape[1])[:, None]
        return torch.where(indices[:, :, 0] > row, -1, indices[:, :, 0]).int()

    def flash_mla_sparse_fwd(query, key_value, indices, scale, *, topk_length):
        indices = within(indices[:, 0], topk_length)
        out = attend(query[None], key_value.transpose(0, 1), indices[None], scale).out
        return out[0], None, None

    def forward(query, key_value, indices, sm_scale):
        return attend(query, key_value[:, :, 0], up_to_row(indices), sm_scale)[:2]

    def pipelined(query, key_value, indices, first, stride, sm_scale):
        assert stride == 1
        return attend(query, key_value[:, :, 0], up_to_row(indices, first), sm_scale)[:2]

    def sparse_mla_bwd(query, key_value, out, grad, indices, lse, sm_scale):
        result = attend(query, key_value[:, :, 0], up_to_row(indices), sm_scale)
        torch.testing.assert_close(lse, result.lse / math.log(2))
        torch.testing.assert_close(out, result.out)
        grad_query, grad_key_value = gradients(query, key_value[:, :, 0], up_to_row(indices), sm_scale, grad)
        return grad_query, grad_key_value[:, :, None]

    def wrapper(query, key_value, out, grad, lse, sink, indices, *, softmax_scale, topk_length):
        assert (sink == -math.inf).all()
        indices = within(indices, topk_length)[None]
        result = attend(query[None], key_value[None], indices, softmax_scale)
        torch.testing.assert_close(lse, result.lse[0])
        torch.testing.assert_close(out, result.out[0])
        both = gradients(query[None], key_value[None], indices, softmax_scale, grad[None])
        return {name: each[0] for name, each in zip(("dq", "dkv"), both, strict=True)}

    modules = {
        "flash_mla": {"flash_mla_sparse_fwd": flash_mla_sparse_fwd},
        "tilelang": {},
        "sparse_mla_fwd": {"sparse_mla_fwd_interface": forward},
        "sparse_mla_fwd_pipelined": {"sparse_mla_fwd_interface": pipelined},
        "sparse_mla_bwd": {"sparse_mla_bwd": sparse_mla_bwd},
        "cudnn": {"__path__": []},
        "cudnn.deepseek_sparse_attention": {"sparse_attention_backward_wrapper": wrapper},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    anew(monkeypatch)
    return SimpleNamespace(**{name.split(".")[-1]: sys.modules[name] for name in modules})


def anew(monkeypatch):
    """Reset the search for projects."""
    fresh = {name: Project(project.modules, project.calls) for name, project in PROJECTS.items()}
    monkeypatch.setattr(rivals, "PROJECTS", fresh)


@pytest.fixture
def timed(monkeypatch):
    """Record the timed calls and the calls before them; a call takes 2 ms warm, or 4 ms cold."""
    calls = []

    def seconds(call, rounds, before=None):
        calls.append((call, before))
        return 2e-3 if before in (None, call) else 4e-3

    monkeypatch.setattr(cuda, "seconds", seconds)
    monkeypatch.setattr(cuda, "matmul_rate", lambda rounds: PEAK)
    return calls


def compared(**options):
    return rivals.compared(Problem(SIZES, "cpu", **options), PEAK, time.monotonic() + 600)


@pytest.mark.parametrize("options", KINDS)
def test_everybody_gets_the_same_problem(options, elsewhere, timed):
    result = compared(**options)
    full = "full" in options
    behind = "its rows see no keys behind them"
    assert set(result["forward"]) == {"ours", "flash_mla", "tilelang", "tilelang_pipelined"}
    assert set(result["backward"]) == {"ours", "cudnn"} | (set() if full else {"tilelang"})
    assert (result["forward"].pop("tilelang") == behind) == full
    pairs = 24 * 8 if full else 24 * 8 - 7 * 8 // 2
    for direction, width in {"forward": 576 + 512, "backward": 3 * 576 + 2 * 512}.items():
        for project, row in result[direction].items():
            assert row["ms"] == 2, (direction, project, row)
            assert row["cold_ms"] == 4
            assert row["tflops"] == pytest.approx(2 * 2 * pairs * width / 2e-3 / 1e12)
            assert row["cold_tflops"] == pytest.approx(row["tflops"] / 2)
            assert row["fraction_of_matmul"] == pytest.approx(row["tflops"] * 1e12 / PEAK)
            assert row["apart"] <= 1e-2
            assert row["apart"] == 0 or project != "ours"


def test_what_is_wrong_is_not_timed(elsewhere, timed, monkeypatch):
    right = elsewhere.sparse_mla_bwd.sparse_mla_bwd
    monkeypatch.setattr(
        elsewhere.sparse_mla_bwd, "sparse_mla_bwd", lambda *x, **y: [1.1 * each for each in right(*x, **y)]
    )
    monkeypatch.setattr(
        elsewhere.flash_mla, "flash_mla_sparse_fwd", lambda query, *x, **y: (query[..., :512] * math.nan,)
    )

    def broken(*tensors, **options):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(elsewhere.sparse_mla_fwd_pipelined, "sparse_mla_fwd_interface", broken)
    result = compared()
    assert result["backward"]["tilelang"] == "differs from ours by 1.0e-01: nothing is timed"
    assert result["forward"]["flash_mla"] == "differs from ours by nan: nothing is timed"
    assert result["forward"]["tilelang_pipelined"] == "RuntimeError: an illegal memory access"
    assert {name for name, row in result["forward"].items() if not isinstance(row, str)} == {
        "ours",
        "tilelang",
    }
    assert {name for name, row in result["backward"].items() if not isinstance(row, str)} == {"ours", "cudnn"}
    # Each is timed once with warm caches, and once with cold ones.
    assert len(timed) == 3 * 4


def test_the_distance_is_of_all_rows_and_results(monkeypatch):
    monkeypatch.setattr(projects, "_ROWS", 5)
    problem = Problem(SIZES, "cpu")
    for name, ours in {"forward": (problem.out,), "backward": problem.gradients}.items():
        assert problem.apart(name, ours) == 0
        theirs = list(ours)
        theirs[-1] = ours[-1] + torch.randn_like(ours[-1])
        expected = (theirs[-1].double() - ours[-1].double()).norm() / ours[-1].double().norm()
        assert problem.apart(name, tuple(theirs)) == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        problem.apart("backward", problem.gradients[:1])


def test_cells_that_matter_come_first_and_each_is_told(timed, monkeypatch):
    cells = rivals.cells()
    assert cells[:2] == [Cell(8192, 64), Cell(8192, 128)]
    assert {(cell.length, cell.heads) for cell in cells[:6]} == {
        (length, heads) for length in (8192, 16384, 32768) for heads in (64, 128)
    }
    assert len(cells) == len({cell.name for cell in cells})
    assert {cell.length for cell in cells} == {2**power for power in range(12, 18)}
    assert {cell.heads for cell in cells} == {16, 64, 128}
    assert {cell.selection for cell in cells} == {
        "causal rows, ascending",
        "causal rows, ascending, neighbours share 0.8",
        "causal rows, random order",
        "full rows, ascending",
        "full rows, random order",
    }
    monkeypatch.setattr(rivals, "cells", lambda quick: [Cell(8, 1), Cell(9, 1), Cell(8, 1, full=True)])
    monkeypatch.setattr(rivals.Sizes, "of", lambda model, **sizes: Sizes(topk=4, **sizes))
    told = []
    whole = rivals.compared

    def within_memory(problem, *others):
        if problem.sizes.length == 9:
            raise torch.cuda.OutOfMemoryError
        return whole(problem, *others)

    monkeypatch.setattr(rivals, "compared", within_memory)
    anew(monkeypatch)
    found = rivals.run(False, 600, lambda found: told.append(json.dumps(found)), "cpu")
    assert [len(json.loads(line)["cells"]) for line in told] == [1, 2, 3]
    assert found["cells"]["S9_H1, causal rows, ascending"] == "does not fit into the memory of the device"
    assert found["cells"]["S8_H1, full rows, ascending"]["forward"]["ours"]["ms"] == 2
    assert set(found["absent"]) == set(PROJECTS)
    assert all(why.startswith("not installed: No module named") for why in found["absent"].values())
    # Without time nothing begins.
    found = rivals.run(False, 0, lambda found: None, "cpu")
    assert set(found["cells"].values()) == {"the part's time was up"}
    late = rivals.compared(Problem(SIZES, "cpu"), PEAK, time.monotonic())
    assert late["forward"]["ours"] == "the part's time was up"


def test_a_project_whose_import_fails_costs_nothing(monkeypatch, tmp_path):
    (tmp_path / "flash_mla.py").write_text("raise OSError('no such library')")
    monkeypatch.syspath_prepend(tmp_path)
    anew(monkeypatch)
    assert rivals.PROJECTS["flash_mla"].absence == "its import fails: OSError: no such library"


FIGURES = {
    "ms": 4.0,
    "tflops": 500.0,
    "fraction_of_matmul": 0.65,
    "cold_ms": 5.0,
    "cold_tflops": 400.0,
    "apart": 0.0,
}
THEIRS = {**FIGURES, "ms": 5.0, "tflops": 400.0, "apart": 3e-3}


def part(*, alone=False):
    rows = {"ours": FIGURES} if alone else {"ours": FIGURES, "flash_mla": THEIRS, "tilelang": "differs"}
    return {
        "matmul_tflops": 770.0,
        "absent": {"cudnn": "not installed: x"},
        "cells": {
            "S8192_H64, causal rows, ascending": {"forward": rows, "backward": {"ours": FIGURES}},
            "S16384_H128, causal rows, ascending": {"forward": rows, "backward": {}},
            "S8192_H64, full rows, ascending": {"forward": rows, "backward": {}},
            "S131072_H128, causal rows, ascending": "does not fit",
        },
    }


def test_figures_in_words():
    lines = list(beside.words({"rivals": part()}))
    name = "S8192_H64, causal rows, ascending: forward"
    for line in (
        "A bf16 matmul of 8192 in the same process reaches 770 TFLOP/s.",
        f"| {name}, ours | 4 | 500 | 65% | 5 | 400 | - | - |",
        f"| {name}, flash_mla | 5 | 400 | 65% | 5 | 400 | 3.0e-03 | 1.25 |",
        "* cudnn: not installed: x",
        "* does not fit (S131072_H128, causal rows, ascending)",
        f"![TFLOP/s over S]({beside.PICTURE})",
    ):
        assert line in lines, line
    assert any(line.startswith("* tilelang, forward: differs (S8192_H64, causal") for line in lines)
    assert beside._PRESENT not in lines
    assert beside._PRESENT in list(beside.words({"rivals": part(alone=True)}))
    assert list(beside.words({"rivals": {"error": "x"}})) == list(beside.words({})) == []


@pytest.mark.parametrize("alone", [False, True])
def test_figures_as_a_picture(alone, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    assert beside.draw(part(alone=alone), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    figure = pyplot.gcf()
    panels = {axis.get_title(loc="left"): axis for axis in figure.axes}
    assert list(panels) == [
        f"{direction}, {heads} heads" for direction in ("forward", "backward") for heads in (64, 128)
    ]
    lines = {line.get_label(): line.get_xydata().tolist() for line in panels["forward, 64 heads"].lines}
    assert lines["ours"] == [[8192, 500]]
    assert ("flash_mla" in lines) != alone
    legend = figure.legends[0]
    assert (legend.get_title().get_text() == beside._PRESENT) == alone
    assert not beside.draw({"error": "x"}, tmp_path / "y.png")
    assert not (tmp_path / "y.png").exists()


def test_rivals_come_last():
    assert list(gpu.PARTS)[-1] == "rivals"
