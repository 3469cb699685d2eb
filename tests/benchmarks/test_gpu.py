"""Parts of ``make gpu`` that need no GPU: refusals, comparisons, conclusions, and reports."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import gpu, parts
from benchmarks.dsa.floor import needed_flops
from benchmarks.dsa.problem import Sizes
from benchmarks.gpu import bounds, features, layer, parity, ranks, streams, words
from benchmarks.registry import CASES

FRACTIONS = {
    "hopper_forward_kernel, 64 heads": 0.5,
    "backward, 64 heads": 0.25,
    "score_slab_kernel, indexer": 0.4,
    "score_gradients_kernel, indexer, GATHERED=True": 0.2,
    "attention_sum_kernel, 64 heads": 0.1,
}
SIDE = {
    "lm_loss": [7.0, 6.9],
    "indexer_loss": [0.1, 0.2],
    "grad_norm": [1.0, 1.5],
    "calls": {"sparse_flash_attention triton": 9},
    "started": 0,
    "weights": "0a1b",
    "rest_mib": 200.0,
    "step_ms": 40.0,
    "tokens_per_s": 1000.0,
    "peak_mib": 300.0,
}
FAST = {**SIDE, "step_ms": 10.0, "tokens_per_s": 4000.0, "peak_mib": 100.0}
NO_FUSED = {"stock": SIDE, "fused": "ValueError: x"}
BOUNDS = {"lm_loss": 1e-3, "indexer_loss": 1e-2, "grad_norm": 1e-2}
SHAPE = layer.Shape("", BOUNDS)


@pytest.mark.parametrize(
    ("built_with", "sentence"),
    [(None, r"was built without CUDA; install a build"), ("13.0", r"sees no NVIDIA GPU; check the driver")],
)
def test_without_a_gpu_it_says_why(built_with, sentence, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", built_with)
    with pytest.raises(SystemExit, match=sentence):
        cli.main(["gpu", "--device", "cpu"])


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("gcc", r"no C compiler; install gcc"),
        ("Python.h", r"Python.h is missing; install .* python3\.\d+-dev"),
    ],
)
def test_what_triton_builds_with_is_asked_for_first(missing, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_dsa.platforms.detect", lambda device: "cuda")
    monkeypatch.setattr("mindspeed_dsa.platforms.describe", lambda device: {"device": "GPU"})
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None if missing == "gcc" else f"/usr/bin/{name}")
    monkeypatch.setattr(gpu.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    with pytest.raises(SystemExit, match=sentence):
        cli.main(["gpu"])


def test_a_part_that_fails_costs_its_own_figures_only(tmp_path, monkeypatch, capsys):
    """The command fails, but only after the report is written."""
    timeouts = {}
    answers = {
        "parity": (0, [{"passed": 3, "skipped": 0, "failures": {"test_x::test_y": "not close"}}], ""),
        "operators": (1, [{"matmul_tflops": 700.0}], "Traceback\nRuntimeError: an illegal memory access"),
        **{
            name: (0, [{}], "")
            for name in ("streams", "selection", "backward", "sanitizer", "compiled", "ranks")
        },
        "layer": (0, [{}, {"a": {"stock": SIDE, "fused": FAST}, "b": {**NO_FUSED, "refused": "w"}}], ""),
    }

    def child(command, *, timeout, stdout, stderr, **options):
        name = command[command.index("benchmarks.gpu.part") + 1]
        timeouts[name] = timeout
        if name == "rivals":
            raise subprocess.TimeoutExpired(command, timeout)
        if name == "features":
            print(json.dumps({"x": {"refused": "y"}}), '{"cut', sep="\n", end="", file=stdout, flush=True)
            raise subprocess.TimeoutExpired(command, timeout)
        code, answer, complaint = answers[name]
        print(*map(json.dumps, answer), sep="\n", file=stdout, flush=True)
        print(complaint, file=stderr, flush=True)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(gpu, "why_no_kernels", lambda: None)
    monkeypatch.setattr(parts.subprocess, "run", child)
    monkeypatch.setattr("mindspeed_dsa.platforms.detect", lambda device: "cuda")
    monkeypatch.setattr("mindspeed_dsa.platforms.describe", lambda device: {"device": "GPU"})
    assert cli.main(["gpu", "--report", str(tmp_path)]) == 1
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert metrics["failed"] == {
        "operators": "it exited with 1: RuntimeError: an illegal memory access",
        "features": f"it was ended after {timeouts['features']} s",
        "rivals": f"it was ended after {timeouts['rivals']} s",
        "parity, test_x::test_y": "not close",
        "layer, b": "w",
        "features, x": "y",
    }
    assert metrics["operators"]["matmul_tflops"] == 700
    assert metrics["layer"]["a"]["fused"] == FAST
    text = (tmp_path / "report.md").read_text()
    assert all(f"**{what}**: {why}" in text for what, why in metrics["failed"].items())
    # Each part can use its own time, and the last part also the time that the others left.
    assert sum(gpu.PARTS.values()) < gpu.LIMIT == 8 * 60
    assert gpu.PARTS["parity"] - 60 < timeouts["parity"] <= gpu.PARTS["parity"]
    assert sum(gpu.PARTS.values()) - 60 < timeouts["rivals"] <= sum(gpu.PARTS.values())


def test_every_test_that_can_run_on_the_device_does():
    folder = parity.ROOT / "tests/ops"
    wanted = {path for path in folder.glob("test_*.py") if "import DEVICE" in path.read_text()}
    found = {parity.ROOT / name for name in parity.files()}
    assert wanted - found == {folder / "test_triton_launch.py"}
    assert {folder / "test_dense_attention.py", folder / "test_fp16_gradients.py"} < found


def test_the_number_of_tokens_from_which_fused_dsa_pays():
    def found(**speedups):
        rows = {f"{name[0]}, 64 heads, {name[1:]} tokens": x for name, x in speedups.items()}
        return {name: {"speedup": x, "stock": {}, "fused": {}} for name, x in rows.items()}

    layers = found(A512=1.5, A1024=0.9, A2048=1.0, A4096=3, B512=0.5, B4096=0.8, C4096=2)
    assert layer.pays_from(layers) == {"A, 64 heads": 2048, "B, 64 heads": None}
    text = list(words.layers({"layer": layers}))
    assert "* A, 64 heads: fused DSA pays from 2048 tokens on" in text
    assert "* B, 64 heads: fused DSA is slower than stock" in text


def test_outcomes_are_read_from_pytests_record():
    record = """<testsuites><testsuite>
        <testcase classname="tests.ops.test_a" name="test_1"/>
        <testcase classname="tests.ops.test_a" name="test_2"><skipped message="no"/></testcase>
        <testcase classname="tests.ops.test_b" name="test_3[x]"><failure message="no&#10;more"/></testcase>
        <testcase classname="tests.ops.test_b" name="test_4"><error message="OOM"/></testcase>
        <testcase classname="tests.ops.test_b" name="test_5"><failure message=""/></testcase>
    </testsuite></testsuites>"""
    failures = {"test_b::test_3[x]": "no", "test_b::test_4": "OOM", "test_b::test_5": "no message"}
    assert parity.outcomes(record) == {"passed": 1, "skipped": 1, "failures": failures}


def test_seconds_of_the_model_are_operations_by_its_fractions():
    flops = needed_flops(Sizes(8192, 64, 64, 2048))
    seconds = bounds.model_seconds(8192, 64, FRACTIONS, 1e15)
    attention, index = flops["sparse_flash_attention"], flops["lightning_indexer"]
    loss = flops["indexer_kl_loss"]["forward_backward"] - index["backward"]
    assert seconds == {
        ("sparse_flash_attention", "forward"): pytest.approx(attention["forward"] / 0.5e15),
        ("sparse_flash_attention", "backward"): pytest.approx(attention["backward"] / 0.25e15),
        ("lightning_indexer", "forward"): pytest.approx(index["forward"] / 0.4e15),
        ("lightning_indexer", "backward"): pytest.approx(index["backward"] / 0.2e15),
        ("indexer_kl_loss", "forward_backward"): pytest.approx(index["backward"] / 0.2e15 + loss / 0.1e15),
    }
    assert list(bounds.model_seconds(8192, 16, FRACTIONS, 1e15)) == [
        ("lightning_indexer", "forward"),
        ("lightning_indexer", "backward"),
    ]


def test_what_is_slower_than_the_model_comes_first():
    ms = {"lightning_indexer": {"forward": {"ms": 5.0}, "backward": {"ms": 90.0}}}
    ms["sparse_flash_attention"] = {"forward": {"ms": 9.0}, "backward": {"ms": 60.0}}
    ms["indexer_kl_loss"] = {"forward_backward": {"ms": 30.0}}
    operators = {"matmul_tflops": 700.0, "S8192_H128": ms, "S32768_H128": "does not fit", "seconds": 1.0}
    slower = bounds.slower_than_model(operators, "NVIDIA H100 80GB HBM3")
    assert len(slower) == 5, "a kernel is not in the model's committed table"
    times = [row["times"] for row in slower.values()]
    assert times == sorted(times, reverse=True)
    assert all(row["times"] == pytest.approx(row["ms"] / row["model_ms"]) for row in slower.values())
    assert next(iter(slower)) == "S8192_H128 lightning_indexer backward"
    assert bounds.slower_than_model(operators, "NVIDIA L4").endswith("and this is NVIDIA L4")


def test_losses_of_a_step_are_compared_before_its_time():
    result = layer.compared({"stock": SIDE, "fused": FAST}, SHAPE)
    assert (result["speedup"], result["peak_ratio"]) == (4, 3)
    assert "refused" not in result
    for name, wrong in (
        ("lm_loss", [7.0, 6.91]),
        ("indexer_loss", [float("nan"), 0.2]),
        ("indexer_loss", [0.1, float("nan")]),
        ("grad_norm", [1.0, 1.52]),
    ):
        result = layer.compared({"stock": SIDE, "fused": {**FAST, name: wrong}}, SHAPE)
        assert result["refused"].startswith(f"{name} of fused DSA is")
        assert "speedup" not in result
    assert "refused" not in layer.compared({"stock": "torch.OutOfMemoryError: CUDA", "fused": FAST}, SHAPE)
    assert layer.compared({"stock": SIDE, "fused": "torch.OutOfMemoryError"}, SHAPE)["refused"]
    assert (
        layer.compared({"stock": "ValueError: x", "fused": FAST}, SHAPE)["refused"] == "stock: ValueError: x"
    )


def test_features_train_as_without_them_and_do_something():
    exact, bounded = features.Case("--x"), features.Case("--x", bounds=BOUNDS)
    result = features.compared(SIDE, FAST, exact)
    assert "refused" not in result
    assert result["step_ratio"] == 0.25
    assert result["peak_mib"] == {"off": 300, "on": 100}
    for case, off, on, why in (
        (exact, SIDE, SIDE, "it did nothing"),
        (exact, SIDE, {**FAST, "weights": "ff"}, "trains otherwise"),
        (exact, SIDE, {**FAST, "grad_norm": [1.0, 1.500001]}, "trains otherwise"),
        (bounded, SIDE, {**FAST, "lm_loss": [7.0, 6.8]}, "lm_loss is 1.4e-02 from that without it"),
        (bounded, "ValueError: x", FAST, "without it: ValueError: x"),
        (exact, SIDE, "ValueError: x", "with it: ValueError: x"),
    ):
        assert why in features.compared(off, on, case)["refused"]
    assert "refused" not in features.compared(SIDE, {**FAST, "weights": "ff"}, bounded)
    moved = {**SIDE, "started": 1}
    assert "refused" not in features.compared(SIDE, moved, exact), "work is on another stream"


def test_a_job_of_several_cases_runs_once(monkeypatch):
    trained, alone = [], []
    monkeypatch.setattr(features, "measure", lambda flags, **_: trained.append(flags) or SIDE)
    monkeypatch.setattr(ranks, "measure", lambda flags: alone.append(flags) or SIDE)
    monkeypatch.setattr(ranks, "_of_ranks", lambda flags, seconds: FAST)
    assert features.run(model="-m").keys() == features.CASES.keys()
    # Fused DSA itself is the reference of other features; swapped attention is one of six such jobs.
    assert len(trained) == len(set(trained)) == len(features.CASES) - 1 + 6
    assert ranks.run(False, 60.0, lambda _: None, "-m").keys() == ranks.CASES.keys()
    assert alone == ["-m --use-fused-dsa", "-m --use-fused-dsa --pack-documents --micro-batch-size 1"]


def test_parts_of_a_layer_beside_each_other():
    """The GPU's code runs here on the CPU. The least size at which nothing is slower is found."""
    found = streams.run(quick=True, rounds=1)
    assert len(found) == 3
    assert all(row["ratio"] > 0 and "refused" not in row for row in found.values())
    ratios = {128: 0.9, 256: 1.1, 512: 0.9, 1024: 1.0, 2048: 0.8, 4096: 0.9, 8192: 1.0}
    measured = {f"indexer's projections, {tokens} tokens": {"ratio": each} for tokens, each in ratios.items()}
    assert streams.least_tokens(measured) == 512
    assert streams.least_tokens({}) is None


@pytest.mark.full
def test_a_step_on_both_sides(tmp_path):
    """The example's model, on the CPU; the same code runs on a GPU."""
    pytest.importorskip("megatron.core")
    result = layer.run(tmp_path, quick=True)["tiny, fp32"]
    assert "refused" not in result
    assert result["apart"]["lm_loss"] <= 1e-5
    losses = result["fused"]["lm_loss"]
    assert len(losses) == layer.STEPS
    assert losses == sorted(losses, reverse=True), "the same batch over and over"
    assert result["fused"]["kernels"] == {}
    assert result["fused"]["calls"].keys() > result["stock"]["calls"].keys()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.full
def test_two_context_parallel_ranks_beside_one():
    """Runs over gloo on the CPU; NCCL's refusal of two ranks on one device would be no failure."""
    pytest.importorskip("megatron.core")
    (row,) = ranks.run(True, 200.0, lambda _: None, cases={"rows in halves": ""}).values()
    assert "refused" not in row, row
    assert row["apart"]["lm_loss"] <= layer.BF16["lm_loss"]
    cut = ranks.run(True, 200.0, lambda _: None, cases={"wrong": "--cp-keep-gathered --num-layers 0"})
    assert gpu.failures({"ranks": cut}).keys() == {"ranks, wrong"}


def test_what_ranks_of_one_device_are_told():
    told = "ncclInvalidUsage: Duplicate GPU detected"
    assert ranks._compared(SIDE, told) == {"absent": f"2 ranks: {told}"}
    assert ranks._compared(SIDE, "ValueError: x") == {"refused": "2 ranks: ValueError: x"}
    found = ranks._compared(SIDE, {**FAST, "lm_loss": [7.0, 6.8]})
    assert found["refused"] == "lm_loss is 1.4e-02 apart"
    assert "refused" not in ranks._compared(SIDE, FAST)


def test_the_report_in_words():
    figures = {"ms": 5.0, "tflops": 300.0, "fraction_of_matmul": 0.4, "extra_peak_mib": 64.0}
    operators = {
        "matmul_tflops": 750.0,
        "S4096_H64": {"sparse_flash_attention": {"forward": figures}},
        "S32768_H64": "does not fit into the memory of the device",
    }
    traced = {**FAST, "kernels": {"forward_kernel": {"ms": 1.0, "launches": 2}}}
    results = {
        "operators": operators,
        "layer": {"one": {"stock": "torch.OutOfMemoryError", "fused": traced}, "seconds": 3.0},
        "features": {"swap": features.compared(SIDE, FAST, features.Case("", bounds=BOUNDS)), "seconds": 9.0},
        "streams": {
            "shared expert, 128 tokens": {"in turns": 0.2, "beside": 0.1, "ratio": 0.5},
            "seconds": 1.0,
        },
        "slower_than_model": {"S4096_H64 x": {"ms": 5.0, "model_ms": 2.0, "times": 2.5}},
        "failed": {},
    }
    text = words.report(results, "NVIDIA H100")
    for name in ("S4096_H64 x", "sparse_flash_attention", "torch.OutOfMemoryError", "forward_kernel", "swap"):
        assert name in text, name


def test_the_makefile_runs_the_case():
    text = Path(parts.ROOT, "Makefile").read_text()
    assert "-m benchmarks gpu --report runs/gpu --json runs/gpu/report.json" in text
    assert set(CASES["gpu"].options) == {"report", "only"}
