"""``make npu`` on the stand-ins: every operator compared with its reference, and whole parts as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks.npu import collectives, operators, ranks, stand_ins
from benchmarks.parts import ROOT
from mindspeed_dsa.tools.cli import doctor_device
from tests.npu import dense_kernels, grouped_kernels, trial
from tests.npu.device import launch


@pytest.mark.parametrize("part", operators.PROBLEMS)
def test_every_operator_beside_its_reference(npu_kernels, monkeypatch, part):
    meta = pytest.importorskip("torch_npu.op_plugin.meta._meta_registrations")
    monkeypatch.setattr(meta, "_npu_fusion_attention_warning_printed", True, raising=False)
    told = []
    found = operators.run(part, quick=True, tell=lambda found: told.append(json.dumps(found)))
    assert json.loads(told[-1]) == json.loads(json.dumps(found))
    assert len(found) == len(operators.PROBLEMS[part])
    for what, row in found.items():
        assert row["wrong"] == {}, what
        assert any(name.startswith("gradient of ") for name in row["apart"]), what
        for direction in ("forward", "backward"):
            assert row[direction]["speedup"] > 0, what
    assert npu_kernels or dense_kernels.calls or grouped_kernels.calls


def test_a_wrong_operator_is_named(npu_kernels, monkeypatch):
    from mindspeed_dsa.ops.swiglu.backends import Npu

    right = Npu.backward
    monkeypatch.setattr(Npu, "backward", lambda *given: 1.1 * right(*given))
    row = operators.run("small", quick=True, tell=lambda found: None)["SwiGLU, tiny, 40 rows"]
    assert row["wrong"] == {"gradient of gate and up": "1.0e-01 from the reference's, more than 2e-02"}


def run(folder, only):
    command = [sys.executable, "-m", "benchmarks", "npu", "--quick", "--report", str(folder), "--only", only]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:] + (folder / "report.md").read_text()
    return json.loads(done.stdout.splitlines()[-1])["metrics"], (folder / "report.md").read_text()


def test_without_an_npu_the_stand_ins_take_its_place(tmp_path):
    metrics, report = run(tmp_path, "machine,experts")
    assert "figures mean nothing" in report
    assert "| grouped experts, tiny, 40 rows, forward | reference |" in report
    assert metrics["machine"]["product"] == {"name": "Atlas A2"}
    assert metrics["failed"] == {}


@pytest.mark.full
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed; make test-npu")
def test_a_layer_trains_by_the_operators(tmp_path):
    metrics, _ = run(tmp_path, "layer,memory")
    fused = metrics["layer"]["tiny"]["fused"]["calls"]
    assert {"lightning_indexer npu", "sparse_flash_attention npu"} <= set(fused)
    assert metrics["memory"]["full recompute"]["apart"]["lm_loss"] == 0


@pytest.mark.full
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed; make test-npu")
def test_two_ranks_beside_one(tmp_path):
    metrics, report = run(tmp_path, "ranks")
    rows = metrics["ranks"]
    for layout in ("TP2, SP", "EP2"):
        assert rows[f"2 ranks, {layout}"]["apart"].keys() == {"lm_loss", "indexer_loss", "grad_norm"}
    assert "| 2 ranks, TP2, SP |" in report
    assert metrics["failed"] == {}


def test_collectives_return_what_they_should(monkeypatch):
    for name, value in stand_ins.environment().items():
        monkeypatch.setenv(name, value)
    rows = ranks._launched(["collectives", "1"], 2, 300)
    assert len(rows) == len(collectives.DTYPES) * len(collectives.COLLECTIVES)
    assert not [name for name, row in rows.items() if "error" in row]


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed; make test-npu")
def test_doctor_trains_on_the_device(monkeypatch):
    command = (sys.executable, "-W", "ignore", "-m", "tests.npu.device", trial.__file__)
    monkeypatch.setattr(doctor_device, "_COMMAND", command)
    for name, value in launch.environment(devices=1).items():
        monkeypatch.setenv(name, value)
    stages = {each.pop("stage"): each for each in doctor_device.examine("npu")}
    assert not [each for each in stages.values() if "error" in each], stages
    assert stages.keys() == {
        "fp32: 2 steps",
        "bf16: 2 steps",
        "bf16 with --use-fused-dsa: 2 steps",
        "bf16 with --use-fused-dsa: save",
        "bf16 with --use-fused-dsa: resume",
    }
    fused = stages["bf16 with --use-fused-dsa: 2 steps"]["operators"]
    assert fused == ["indexer_kl_loss npu", "lightning_indexer npu", "sparse_flash_attention npu"]
