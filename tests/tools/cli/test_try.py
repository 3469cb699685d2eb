"""``try``: both sides alternate and are compared; missing packages and sides that exit are reported.

The sides of the quick tests answer without training (``fake_side.py``); the long test trains.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.cli import trial


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Return the output folder of ``try``, with sides that do not train."""
    monkeypatch.setattr(trial, "_MODULE", "tests.tools.cli.fake_side")
    return tmp_path / "out"


def run(folder, *argv):
    return main(["try", "--steps", "3", "--seq-length", "100", "--output-dir", str(folder), *argv])


def test_both_sides_are_compared(fake, capsys):
    assert run(fake) == 0
    printed = capsys.readouterr().out
    assert "step 3: stock Megatron: 100 tokens/s, loss 2.000000; --use-fused-dsa: 400 tokens/s" in printed
    assert "4.00 times" in printed
    assert "0.50 of it" in printed
    assert "losses of 3 steps: the same; largest relative difference 0.0e+00" in printed
    report = json.loads((fake / "try.json").read_text())
    assert report["sides"]["fused"] == {
        "losses": [4.0, 3.0, 2.0],
        "tokens_per_s": 400.0,
        "peak_memory_bytes": 2**23,
    }
    assert report["versions"]["megatron-core"]
    assert (fake / "try.png").read_bytes().startswith(b"\x89PNG")


def test_losses_that_differ_are_exit_status_1(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_SIDE_GAP", "0.01")
    assert run(fake) == 1
    assert "NOT THE SAME" in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_not_the_same():
    def records(*losses):
        return [{"lm_loss": loss, "step_time_s": 1.0, "peak_memory_bytes": 1.0} for loss in losses]

    found = trial.summary({"stock": records(4.0, 3.0, 2.0), "fused": records(4.0, math.nan, 2.0)}, 8)
    assert "NOT THE SAME" in trial.table(found)[-1]


def test_without_matplotlib_there_is_no_picture(fake, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(fake) == 0
    assert "no picture without matplotlib: pip install 'mindspeed_dsa[viz]'" in capsys.readouterr().out
    assert not (fake / "try.png").exists()


def test_a_side_that_ends_is_named_with_its_log(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_SIDE_DIES", "1")
    assert run(fake) == 1
    said = capsys.readouterr().err
    assert "the side of --use-fused-dsa has ended with exit code 1" in said
    assert "the fused side has died" in said


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ({"torch", "megatron.core"}, "torch and megatron-core are not installed"),
        ({"megatron.core"}, "megatron-core is not installed"),
    ],
)
def test_what_is_missing_is_said_in_one_line(gone, said, monkeypatch, capsys):
    monkeypatch.setattr(trial.versions, "is_importable", lambda module: module not in gone)
    assert main(["try"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert "pip install 'mindspeed_dsa[megatron]'" in lines[0]


def test_a_megatron_without_sparse_attention_is_refused(monkeypatch):
    monkeypatch.setattr(trial.versions, "of_megatron", lambda: "0.15.3")
    with pytest.raises(SettingsError, match=r"begins with megatron-core 0.16, and 0.15.3 is installed"):
        trial.run([])


@pytest.mark.parametrize("argv", [["--steps", "1"], ["--seq-length", "1"]])
def test_sizes_that_measure_nothing_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as status:
        main(["try", *argv])
    assert status.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_the_version_is_the_distributions(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mindspeed_dsa ")


def test_the_models_of_both_commands_are_built(pool):
    (names,) = pool.run("tests.tools.cli.built_models:parameters", 1)
    assert set(names) == {"try", "doctor --device"}
    for parameters in names.values():
        for part in ("indexer.linear_wq_b", "linear_q_up_proj.layer_norm_weight", "output_layer.weight"):
            assert any(part in name for name in parameters), part


@pytest.mark.full
def test_a_small_model_trains_the_same_on_both_sides(tmp_path):
    """Losses fall, equal stock Megatron's, and only the fused side runs the operators."""
    command = [sys.executable, "-m", "mindspeed_dsa", "try", "--quick", "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "try.json").read_text())
    stock, fused = (report["sides"][side]["losses"] for side in ("stock", "fused"))
    assert stock == pytest.approx(fused, rel=1e-5)
    assert stock[-1] < stock[0] - 0.1
    logs = {side: (tmp_path / "out" / f"{side}.log").read_text() for side in ("stock", "fused")}
    assert "sparse_flash_attention runs on" in logs["fused"]
    assert "sparse_flash_attention runs on" not in logs["stock"]
