"""Parts of ``make npu`` that need no torch_npu: refusals, comparisons, conclusions, and reports."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import installed, npu, parts
from benchmarks.gpu import layer
from benchmarks.npu import operators, ranks, steps, words
from benchmarks.npu.operators import Problem
from benchmarks.parts import ROOT
from benchmarks.registry import CASES
from mindspeed_dsa import platforms
from mindspeed_dsa.ops.backend import BackendUnavailable
from mindspeed_dsa.patches.errors import SettingsError


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ({"torch_npu", "wrapt"}, r"torch_npu, wrapt are not installed for .*: install the .* NPU_VENV=DIR"),
        (
            {"megatron.core"},
            r"megatron-core is not .*: python -m pip install .* torch==7 torch_npu==7, which",
        ),
    ],
)
def test_what_is_missing_is_named_before_anything_is_imported(missing, sentence, monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name in missing else object())
    monkeypatch.setattr(installed.metadata, "version", lambda name: "7")
    for flags in ([], ["--quick"]):
        with pytest.raises(SystemExit, match=sentence):
            cli.main(["npu", *flags])


@pytest.mark.parametrize(
    ("available", "sentence"),
    [
        (False, r"sees no NPU; source CANN's set_env.sh, check npu-smi info .* make npu ARGS=--quick"),
        (SettingsError("torch_npu 2.9.0 does not load"), r"npu: torch_npu 2.9.0 does not load"),
    ],
)
def test_without_an_npu_it_says_what_to_do(available, sentence, monkeypatch):
    def is_available():
        if isinstance(available, Exception):
            raise available
        return available

    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    monkeypatch.setattr(platforms.get("npu"), "is_available", is_available)
    with pytest.raises(SystemExit, match=sentence):
        cli.main(["npu", "--device", "cpu"])


def rule(name):
    """Return a function that reads variables and the recipe from make, without running it."""

    def run(*words):
        command = ["make", "--no-print-directory", "--dry-run", "--always-make", name, *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    return run


def test_make_npu_takes_the_environment_as_it_is():
    make = rule("npu")
    assert "pip" not in make()
    assert " python3 -m benchmarks npu" in make()
    assert " mine/bin/python -m benchmarks npu" in make("NPU_VENV=mine")


def test_make_test_npu_has_an_environment_for_each_release():
    made = rule("test-npu")("NPU_RELEASE=2.9.0.post2")
    assert ".venv-npu-2.9.0.post2/bin/python -m pytest" in made
    assert "s/^torch==.*/torch==2.9.0/" in made
    assert "--no-deps torch_npu==2.9.0.post2" in made
    assert ".venv-npu/" not in made
    made = rule("test-npu")()
    assert "\t.venv-npu/bin/python -m pytest" in made
    assert "--no-deps torch_npu==2.13.0" in made


def problem(scale, refuses=False, fits=True, place=0):
    """Return ``2 * x`` in bf16, with one side's gradient multiplied by ``scale``."""
    x = torch.arange(1.0, 7.0, requires_grad=True)

    def forward(backend):
        if backend == "npu" and refuses:
            raise BackendUnavailable("it takes bfloat16 only")
        if backend != "npu" and not fits:
            raise RuntimeError("NPU out of memory. Tried to allocate 2 GiB")
        return {"out": (2 * x).bfloat16()}

    def backward(backend, outputs, grad):
        return {"gradient of x": torch.ones(6) * (scale if backend == "npu" else 1)}

    return Problem("rms_norm", {"x": x}, forward, backward)


def test_an_operator_is_compared_before_it_is_timed():
    result = operators.compared(problem(1.001), rounds=1)
    assert (result["reference"], result["wrong"]) == ("reference", {})
    assert result["apart"] == {"out": 0, "gradient of x": pytest.approx(1e-3, rel=1e-3)}
    for direction in ("forward", "backward"):
        figures = result[direction]
        assert figures["speedup"] == pytest.approx(figures["reference_ms"] / figures["ms"])
    result = operators.compared(problem(1.1), rounds=1)
    assert result["wrong"] == {"gradient of x": "1.0e-01 from the reference's, more than 5e-03"}
    result = operators.compared(problem(float("nan")), rounds=1)
    assert result["wrong"].keys() == {"gradient of x"}
    assert operators.compared(problem(1, refuses=True), rounds=1)["refused"] == "it takes bfloat16 only"
    result = operators.compared(problem(1, fits=False), rounds=1)
    assert result["reference"] == "reference does not fit into the device's memory"
    assert "apart" not in result
    assert "speedup" not in result["forward"]


def test_selections_are_compared_as_sets_and_scores_in_order():
    ours, theirs = (torch.tensor(each)[None] for each in ([[1, 0], [0, -1]], [[0, 1], [0, -1]]))
    scores = torch.tensor([[[3.0, 2.0], [1.0, -torch.inf]]])
    both = {"topk_indices": theirs, "topk_scores": scores}
    assert operators.apart({"topk_indices": ours, "topk_scores": scores.flip(-1)}, both)[1] == {}
    _, wrong = operators.apart(
        {"topk_indices": torch.tensor([[[1, 0], [1, -1]]]), "topk_scores": scores}, both
    )
    assert wrong.keys() == {"topk_indices"}
    missing = scores.masked_fill(scores == 1, -torch.inf)
    _, wrong = operators.apart({**both, "topk_scores": missing}, both)
    assert wrong.keys() == {"topk_scores"}


FIGURES = {
    "ms": 5.0,
    "reference_ms": 10.0,
    "speedup": 2.0,
    "extra_peak_mib": 1.0,
    "reference_extra_peak_mib": 4.0,
}
SLOW = {**FIGURES, "reference_ms": 4.0, "speedup": 0.8}
GOOD = {"reference": "chunked", "apart": {"out": 1e-3}, "wrong": {}, "forward": FIGURES, "backward": FIGURES}
LAYOUT = {"apart": {"lm_loss": 1e-5, "grad_norm": 2e-3}, "step_ms": 8.0, "step_ratio": 0.5}
FOUND = {
    "machine": {
        "versions": {"torch": "2.13.0", "torch_npu": None},
        "product": {"name": "Atlas A2"},
        "limits": {"indexer heads": "up to 64"},
        "environment": {"TASK_QUEUE_ENABLE": "2"},
        "missing": {"npu_swiglu": "torch_npu 2.6.0 has no npu_swiglu"},
        "seconds": 1.0,
    },
    "indexer": {"good": GOOD, "slow": {**GOOD, "backward": SLOW}, "seconds": 3.0},
    "attention": {"refused": {"reference": "chunked", "refused": "heads"}, "error": "it was ended after 9 s"},
    "loss": {
        "far": {**GOOD, "wrong": {"loss": "far away"}},
        "large": {"reference": "chunked does not fit", "forward": {"ms": 1.0}, "backward": {"ms": 1.0}},
        "broken": {"error": "RuntimeError: aclnn"},
    },
    "layer": {"one": {"stock": "x", "fused": {"calls": {"lightning_indexer npu": 1}}, "speedup": 0.5}},
    "memory": {"swap": {"refused": "it did nothing"}},
    "ranks": {
        "2 ranks, collectives": {
            "rows": {
                "all-reduce, int8": {"error": "Unsupported"},
                "all-to-all, int32": {"ms": 2.0, "gb_s": 16.0},
            }
        },
        "2 ranks, CP2": {"refused": "lm_loss is 1.0e-01 from that of one rank"},
        "2 ranks, PP2": LAYOUT,
        "2 ranks, TP2, MC2": {**LAYOUT, "step_ratio": 1.25},
        "2 ranks, TP2, CoC": {"absent": "without it: its time was not reached"},
    },
    "profile": {"kernels": {"Sort on AI_CPU": {"ms": 3.0, "launches": 2}}},
}


def test_the_report_says_by_itself_what_is_wrong_slower_or_refused():
    verdict = npu.verdict(FOUND, {"layer": ["rms_norm: backend 'npu' is skipped for 'reference': fp64"]})
    assert verdict == {
        "failed": {
            "attention": "it was ended after 9 s",
            "far, loss": "far away",
            "broken": "RuntimeError: aclnn",
            "memory, swap": "it did nothing",
            "ranks, 2 ranks, collectives, all-reduce, int8": "Unsupported",
            "ranks, 2 ranks, CP2": "lm_loss is 1.0e-01 from that of one rank",
        },
        "slower": {
            "slow, backward": "5 ms, chunked 4 ms",
            "layer, one": "fused DSA takes 2.00 times as long as stock",
            "ranks, 2 ranks, TP2, MC2": "a step takes 1.25 times as long as without it",
        },
        "refused": {
            "npu_swiglu": "torch_npu 2.6.0 has no npu_swiglu",
            "refused": "heads",
            "layer, 1": "rms_norm: backend 'npu' is skipped for 'reference': fp64",
        },
        "not_compared": {
            "large": "chunked does not fit",
            "ranks, 2 ranks, TP2, CoC": "without it: its time was not reached",
        },
    }
    fused = {"calls": {"lightning_indexer npu": 1}, "tokens_per_s": 9.0}
    found = {**FOUND, **verdict, "layer": {"one": {"stock": "OutOfMemoryError", "fused": fused}}}
    text = words.report(found, "Ascend910B3", npu.OPERATOR_PARTS)
    for name in (*verdict["failed"], *verdict["slower"], "OutOfMemoryError", "lightning_indexer npu"):
        assert name in text, name


def test_fallbacks_are_read_from_the_log(tmp_path):
    sentence = "rotary: backend 'npu' is skipped for 'reference': fp64"
    log = tmp_path / "layer.log"
    log.write_text(f"x\nmindspeed_dsa: {sentence}\nmindspeed_dsa: {sentence}\n")
    assert npu.skipped(log) == [sentence]


def test_torch_npus_profile_is_read(tmp_path):
    table = tmp_path / "op_statistic.csv"
    table.write_text(
        "\ufeffDevice_id,OP Type,Core Type,Count,Total Time(us),Min Time(us),Ratio(%)\n"
        "0,Add,AI_VECTOR_CORE,4,8.0,1.0,1\n0,Sort,AI_CPU,2,3000.5,1.0,99\n",
        encoding="utf-8",
    )
    assert steps.operators_of(table) == {
        "Sort on AI_CPU": {"ms": 3.0005, "launches": 2},
        "Add on AI_VECTOR_CORE": {"ms": 0.008, "launches": 4},
    }


def test_parts_and_limits():
    assert sum(npu.PARTS.values()) < npu.LIMIT == 3600
    assert set(npu.OPERATOR_PARTS) == set(operators.PROBLEMS)
    deepseek, glm = operators.FULL.values()
    assert (deepseek.heads, deepseek.index_heads, deepseek.topk) == (128, 64, 2048)
    assert (glm.heads, glm.index_heads, glm.topk) == (64, 32, 2048)


def test_the_makefile_runs_the_case():
    text = (parts.ROOT / "Makefile").read_text()
    assert re.search(r"-m benchmarks npu --report runs/npu \\\n\s+--json runs/npu/report.json", text)
    assert set(CASES["npu"].options) == {"report", "only"}


def test_what_several_ranks_are_compared_with(monkeypatch):
    side = {"lm_loss": [7.0, 6.9], "indexer_loss": [None, None], "grad_norm": [1.0, 1.0], "step_ms": 4.0}
    told, jobs = [], []

    def launched(words, count, seconds):
        jobs.append((words[0], count, " ".join(words).partition("--use-fused-dsa ")[2]))
        if words[0] == "collectives":
            return {"all-reduce, bfloat16": {"ms": 1.0, "gb_s": 2.0}}
        if "--use-ascend-coc" in words:
            return {**side, "lm_loss": [7.0, 7.9]}
        return "HCCL error" if "--context-parallel-size" in words else {**side, "step_ms": 2.0}

    monkeypatch.setattr(ranks, "_launched", launched)
    monkeypatch.setattr(platforms.current(), "device_count", lambda: 2, raising=False)
    found = ranks.run(False, 1000.0, lambda found: told.append(dict(found)))
    assert told[-1] == found
    assert jobs[1] == ("train", 1, "")
    assert found["2 ranks, EP2"] == {
        "apart": {"lm_loss": 0, "grad_norm": 0},
        "step_ms": 2.0,
        "step_ratio": 1.0,
    }
    assert found["2 ranks, TP2, CoC"]["refused"] == "lm_loss is 1.4e-01 from that of without it"
    assert found["2 ranks, CP2"] == {"refused": "several ranks: HCCL error"}
    assert not any(case.startswith("8") for case in found)
    assert [job for job in jobs if job[1] > 2] == []
    monkeypatch.setattr(platforms.current(), "device_count", lambda: 8, raising=False)
    jobs.clear()
    assert "8 ranks, EP8" in ranks.run(False, 1000.0, lambda found: None)
    assert [job for job in jobs if job[:2] == ("train", 1)] == [("train", 1, "")], "one rank trains once"
    late = ranks.run(False, 0.0, lambda found: None)
    assert late["2 ranks, PP2"] == {"absent": "one rank: its time was not reached"}
    monkeypatch.setattr(platforms.current(), "device_count", lambda: 1, raising=False)
    assert ranks.run(False, 1.0, lambda found: None) == {"several ranks": {"absent": "1 device is visible"}}


def test_fused_steps_come_before_stock_ones(monkeypatch):
    order, told = [], []

    def measure(flags, trace=None):
        order.append(flags.split()[0])
        return "no memory"

    monkeypatch.setattr(layer, "measure", measure)
    shapes = {name: layer.Shape("", layer.BF16) for name in ("one", "two")}
    layer.run(None, tell=lambda found: told.append(dict(found)), shapes=shapes)
    assert order == ["--use-fused-dsa"] * 2 + ["--no-use-fused-dsa"] * 2
    assert told[0].keys() == {"one"}
