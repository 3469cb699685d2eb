"""The recipe for Megatron-LM: its launcher on a small fork, and pretrain_gpt.py if there is a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import training_loop as loop
from tests.support import warm

RECIPE = Path(__file__).parents[2] / "examples" / "megatron_lm"
LAUNCHER = RECIPE / "run_megatron.py"
# `megatron.core` is the installed one, as everywhere else in these tests; only the training part is a stub.
SCRIPT = """
import sys
import stub_training.training as training
from helper_of_the_checkout import NAME

def main():
    print(NAME, __name__, sys.argv[1:], sys.path[0])
    training.train(2)

if __name__ == "__main__":
    main()
"""


DUALPIPEV, FOUR = "--pipeline-model-parallel-size 2 --schedules-method dualpipev", "--micro-batch-size 2"
# Documents of the mock data; only the first pipeline stage knows their ends.
PACKED = "--use-fused-dsa --pack-documents --micro-batch-size 1"


@pytest.fixture
def checkout(tmp_path):
    """Return a folder like a checkout: a script, a module next to it, and Megatron's packages."""
    root = loop.write(tmp_path / "checkout")
    (tmp_path / "checkout" / "helper_of_the_checkout.py").write_text("NAME = 'helper'\n")
    script = SCRIPT.replace("stub_training.training", f"{root}.training.training")
    (tmp_path / "checkout" / "pretrain.py").write_text(script)
    return tmp_path / "checkout"


def launch(*argv, cwd, run=subprocess.run, **environment):
    command = [sys.executable, str(LAUNCHER), *map(str, argv)]
    paths = os.pathsep.join([*filter(None, [environment.pop("PYTHONPATH", None)]), str(RECIPE.parents[1])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
    return run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=250)


def test_the_script_runs_as_if_it_had_been_started_itself(checkout, tmp_path):
    # Named, as otherwise the small fork would be taken for the job's Megatron, which has all targets.
    argv = ["--num-layers", "3", "--megatron-root", "megatron"]
    done = launch("checkout/pretrain.py", *argv, cwd=tmp_path, run=warm.run)
    assert done.stdout.split("\n")[0] == f"helper __main__ {argv} {checkout}", done.stderr
    assert done.returncode == 0


def test_patches_are_there_before_the_scripts_first_line(checkout, tmp_path):
    # The fork's own core is too small for the platform's patches, so only this feature is declared.
    (checkout / "sitecustomize.py").write_text(
        "from mindspeed_dsa import features\n"
        "from mindspeed_dsa.features.diagnostics.steps.feature import STEP_METRICS\n"
        "features.built_in = lambda: (STEP_METRICS,)\n"
    )
    metrics = tmp_path / "metrics.jsonl"
    argv = ["--step-metrics-file", metrics, "--megatron-root", "corp_megatron"]
    done = launch("checkout/pretrain.py", *argv, cwd=tmp_path, PYTHONPATH=str(checkout))
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2]


def test_bad_command_lines_are_refused_in_one_line(checkout, tmp_path):
    done = launch(cwd=tmp_path, run=warm.run)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: run_megatron.py SCRIPT")
    done = launch("checkout/pretrian.py", cwd=tmp_path, run=warm.run)
    assert done.returncode == 1
    assert f"there is no script {checkout / 'pretrian.py'}" in done.stderr
    done = launch("checkout/pretrain.py", "--mindspeed-platform", "npu", cwd=tmp_path, run=warm.run)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "npu" in done.stderr


def test_what_is_refused_while_the_script_runs_is_the_message_alone(checkout, tmp_path):
    (checkout / "pretrain.py").write_text(
        "from mindspeed_dsa.runs.files import RunError\n"
        "raise RunError('mindspeed_dsa load-hf: the files are cut; fetch them again') from OSError()\n"
    )
    done = launch("checkout/pretrain.py", "--megatron-root", "megatron", cwd=tmp_path, run=warm.run)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == "pretrain.py: mindspeed_dsa load-hf: the files are cut; fetch them again"
    assert "Traceback" not in done.stderr


@pytest.fixture
def recipe(tmp_path):
    """Return a runner of the recipe with a Python that prints its arguments."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "${CUDA_DEVICE_MAX_CONNECTIONS-unset}"\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    for name in ("training/arguments.py", "core/datasets/gpt_dataset.py"):
        file = tmp_path / "megatron" / name
        file.parent.mkdir(parents=True)
        file.write_text("(numpy.arange(length - 1) + 1) % self.vocab_size\n" if "core" in name else "")

    def run(*argv, tokens_wrap=True, **environment):
        if not tokens_wrap:
            (tmp_path / "megatron/core/datasets/gpt_dataset.py").write_text("numpy.arange(length - 1) + 1\n")
        inherited = {
            name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"
        }
        environment = {**inherited, "MEGATRON_LM": str(tmp_path), "PYTHON": str(python), **environment}
        command = ["bash", str(RECIPE / "pretrain_gpt_dsa.sh"), *argv]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr
        connections, *words = done.stdout.splitlines()
        return connections, words

    return run


@pytest.mark.parametrize(
    ("flags", "environment", "connections"),
    [
        ([], {}, "1"),
        ([], {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8"),
        (["--use-torch-fsdp2"], {}, "unset"),
        (["--use-megatron-fsdp", "--seed", "2"], {}, "unset"),
        (["--use-torch-fsdp2"], {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "32"),
    ],
)
def test_connections_are_those_that_megatron_asks_for_or_the_users(recipe, flags, environment, connections):
    """Tensor parallelism needs one connection, which FSDP refuses."""
    found, words = recipe(*flags, **environment)
    assert found == connections
    assert words[len(words) - len(flags) :] == flags


def test_the_vocabulary_has_room_for_mock_data(recipe):
    """Before 0.16 mock tokens go up to 4094 for any vocabulary; the last token ends documents."""
    for wrap, size in ((True, "255"), (False, "4095")):
        _, words = recipe(tokens_wrap=wrap)
        assert words[words.index("--vocab-size") + 1] == size


_MARKS = (
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM"
    ),
)


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


def with_checkout(test):
    for mark in _MARKS:
        test = mark(test)
    return test


def pretrain(metrics, *more, nproc=1, **environment):
    """Run the recipe; return its output, and the metrics of each step."""
    command = [
        "bash",
        str(RECIPE / "pretrain_gpt_dsa.sh"),
        "--eval-interval",
        "100",
        "--lr-decay-iters",
        "50",
    ]
    environment = {**os.environ, "NPROC": str(nproc), "PYTHON": sys.executable, **environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(RECIPE.parents[1]), *sys.path])
    command += ["--step-metrics-file", str(metrics), *map(str, more)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-9000:]
    steps = {record["step"]: record for record in map(json.loads, metrics.read_text().splitlines())}
    return done.stdout + done.stderr, steps


@with_checkout
@pytest.mark.parametrize(
    ("flags", "data"),
    [
        ("", ""),
        ("--tensor-model-parallel-size 2 --sequence-parallel", ""),
        ("--tensor-model-parallel-size 2 --sequence-parallel --use-fused-dsa", ""),
        ("--pipeline-model-parallel-size 2", ""),
        ("--expert-model-parallel-size 2 --use-distributed-optimizer", ""),
        (f"{DUALPIPEV} --tensor-model-parallel-size 2 --sequence-parallel", FOUR),
        ("--pipeline-model-parallel-size 2", PACKED),
        ("--tensor-model-parallel-size 2 --sequence-parallel", PACKED),
    ],
    ids=["1", "tp2", "tp2-fused", "pp2", "ep2", "dualpipev-tp2", "pp2-packed", "tp2-packed"],
)
def test_pretrain_gpt_agrees_with_one_process_and_resumes(tmp_path, flags, data):
    """From one checkpoint of weights, every layout and a resumed run make the same steps."""

    def run(name, *more, nproc=1):
        printed, steps = pretrain(tmp_path / f"{name}.jsonl", *data.split(), *more, nproc=nproc)
        wanted = {*data.split(), *map(str, more)}
        for feature in ("fused-dsa", "pack-documents"):
            assert (f"\n{feature} " in printed) == bool(wanted & {f"--{feature}", f"--use-{feature}"})
        return steps

    weights = tmp_path / "weights"
    run("initial", "--train-iters", "2", "--save", weights, "--save-interval", "2")
    start = ["--load", weights, "--no-load-optim", "--no-load-rng", "--train-iters", "6"]
    one = run("one", *start)
    nproc = 4 if DUALPIPEV in flags else 2 if flags else 1
    kept = [*flags.split(), "--save", tmp_path / "kept", "--save-interval", "4"]
    there = run("layout", *start, *kept, nproc=nproc)
    assert list(there) == list(one) == [3, 4, 5, 6]
    # Another order of sums changes some near ties of eight index heads.
    loose = 10 if "fused" in flags + data else 1
    for step, record in there.items():
        assert record["lm_loss"] == pytest.approx(one[step]["lm_loss"], rel=1e-5 * loose)
        assert record["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=5e-4 * loose)
        assert record["indexer_loss"] == pytest.approx(one[step]["indexer_loss"], rel=1e-3 * loose)

    resume = [*flags.split(), "--load", tmp_path / "kept", "--ckpt-step", "4", "--train-iters", "6"]
    resumed = run("resumed", *resume, nproc=nproc)
    assert [resumed[step]["lm_loss"] for step in (5, 6)] == [there[step]["lm_loss"] for step in (5, 6)]


@with_checkout
def test_layouts_start_from_the_same_weights_through_a_checkpoint(tmp_path):
    """Layouts draw different weights; one process's first save contains the weights that it drew."""
    flags = ["--use-fused-dsa", "--use-cpu-initialization", "--train-iters", "1"]
    parallel = ["--context-parallel-size", "2"]

    def run(name, *more, nproc=1):
        digests = tmp_path / name
        _, steps = pretrain(
            tmp_path / f"{name}.jsonl", *flags, "--initial-weights-dir", digests, *more, nproc=nproc
        )
        return steps[1], json.loads((digests / "weights-rank00000.json").read_text())["parameters"]

    kept = ["--save", tmp_path / "kept", "--save-interval", "1"]
    _, drawn = run("one", *kept)
    _, others = run("two", *parallel, nproc=2)
    assert drawn.keys() == others.keys()
    assert drawn != others, "Megatron's warm-up draws the same in every layout now: say so on the page"

    start = ["--load", tmp_path / "kept", "--finetune"]
    step, loaded = run("one-loaded", *start)
    there, loaded_there = run("two-loaded", *start, *parallel, nproc=2)
    assert loaded == loaded_there == drawn
    assert there["lm_loss"] == pytest.approx(step["lm_loss"], rel=1e-6)
    assert there["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-3)


@with_checkout
@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"], ids=["plain", "distributed"])
@pytest.mark.parametrize("first", ["", "--moe-tp-extend-ep"], ids=["on", "off"])
def test_the_layout_of_experts_may_change_at_a_checkpoint(tmp_path, first, optimizer):
    """Only the flag changes: Megatron-LM's own loop resumes as if it had not, optimizer included."""

    def run(name, *more):
        flags = f"{TP2} {optimizer} --train-iters 4 --ckpt-format torch_dist".split()
        return pretrain(tmp_path / f"{name}.jsonl", *flags, *more, nproc=2)

    reshardable = ["--dist-ckpt-optim-fully-reshardable"] if optimizer else []
    keep = ["--save", tmp_path / "kept", "--save-interval", "2"]
    load = ["--load", tmp_path / "kept", "--ckpt-step", "2"]
    second = "" if first else "--moe-tp-extend-ep"
    _, whole = run("whole", *first.split(), *reshardable, *keep)
    printed, resumed = run("resumed", *second.split(), *reshardable, *load)
    assert "generators for another layout; they begin anew" in printed
    assert list(resumed) == [3, 4]
    for step, record in resumed.items():
        assert record["lm_loss"] == pytest.approx(whole[step]["lm_loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(whole[step]["grad_norm"], rel=5e-4)


@with_checkout
def test_slices_of_buffers_are_refused_in_another_layout_of_experts(tmp_path):
    flags = f"{TP2} --use-distributed-optimizer --train-iters 2 --ckpt-format torch_dist".split()
    pretrain(tmp_path / "first.jsonl", *flags, "--save", tmp_path / "kept", "--save-interval", "2", nproc=2)
    flags += ["--moe-tp-extend-ep", "--load", tmp_path / "kept"]
    with pytest.raises(
        AssertionError, match=r"as dp_reshardable, slices of buffers; save it with --dist-ckpt"
    ):
        pretrain(tmp_path / "second.jsonl", *flags, nproc=2)
    assert not (tmp_path / "second.jsonl").exists()
