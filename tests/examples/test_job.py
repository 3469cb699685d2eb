"""The job as a whole, in one process."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from dsa_job.checkpoints import complete_steps, latest

from mindspeed_dsa.runs import manifest

from .conftest import Finished, JobServer, records, results

FIELDS = sorted("step lm_loss indexer_loss grad_norm tokens_per_s step_time_s peak_memory_bytes".split())


def assert_refused(finished: Finished, message: str) -> None:
    assert finished.code == 2, finished.output
    assert message in finished.output
    assert "Traceback" not in finished.output
    assert "a process group" not in finished.output  # the worker prints this when one is created


def test_a_finished_run_leaves_everything_behind(jobs: JobServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = jobs.run(run)
    assert finished.code == 0, finished.output
    steps = records(run)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    for record in steps:
        assert sorted(record) == FIELDS
        assert all(math.isfinite(value) and value > 0 for value in record.values())
        assert record["tokens_per_s"] == pytest.approx(2 * 32 / record["step_time_s"])
        assert record["peak_memory_bytes"] > 50e6
    assert steps[0]["lm_loss"] == pytest.approx(math.log(256), rel=0.05)  # random weights know nothing
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"] - 0.2
    summary = json.loads((run / "summary.json").read_text())
    heldout = records(run, "heldout.jsonl")
    assert [record["step"] for record in heldout] == [0, 3, 6]
    assert summary["heldout_loss_first"] == heldout[0]["heldout_loss"]
    assert summary["heldout_loss_last"] == heldout[-1]["heldout_loss"] < summary["heldout_loss_first"] - 0.2
    assert summary["final_lm_loss"] == pytest.approx(sum(record["lm_loss"] for record in steps) / 6)
    assert 2 < summary["unigram_entropy"] < 3
    assert summary["steps"] == 6
    assert complete_steps(run / "checkpoints") == [2, 4, 6]
    assert latest(run / "checkpoints") == 6


@pytest.mark.full
def test_two_runs_of_one_job_are_equal(jobs: JobServer, tmp_path: Path) -> None:
    for _ in range(2):
        assert jobs.run(tmp_path / "run", "--train-iters", "2", "--no-save").code == 0
    assert results(tmp_path / "run") == results(tmp_path / "run-2")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_job_leaves_no_model_behind(jobs: JobServer, tmp_path: Path) -> None:
    # Without a final evaluation, the model last processed a microbatch with a graph.
    flags = ("--train-iters", "2", "--no-save", "--eval-iters", "0")
    finished = jobs.run(tmp_path / "run", *flags, fault="none, but look for the model afterwards")
    assert finished.code == 0, finished.output
    assert "2 watched, 0 left" in finished.output


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--num-experts", "0"], marks=pytest.mark.full),
        pytest.param(["--mtp-num-layers", "1"], marks=pytest.mark.full),
        ["--bf16", "--recompute-activations"],
    ],
    ids=["dense", "mtp", "bf16-recompute"],
)
def test_other_models_train_too(jobs: JobServer, tmp_path: Path, flags: list[str]) -> None:
    finished = jobs.run(tmp_path / "run", "--no-save", *flags)
    assert finished.code == 0, finished.output
    steps = records(tmp_path / "run")
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"] - 0.1
    assert all(record["indexer_loss"] > 0 for record in steps)


@pytest.mark.full
def test_initial_weights_can_be_saved_and_loaded(jobs: JobServer, tmp_path: Path) -> None:
    initial = tmp_path / "initial"
    saved = jobs.run(
        tmp_path / "none", "--train-iters", "0", "--lr-warmup-iters", "0", "--save", str(initial)
    )
    assert saved.code == 0, saved.output
    assert latest(initial) == 0
    assert not (tmp_path / "none").exists()
    before = sorted(path.stat().st_mtime_ns for path in initial.rglob("*"))
    options = ("--train-iters", "2", "--no-save", "--hidden-dropout", "0")
    assert jobs.run(tmp_path / "seed", *options).code == 0
    # Another seed would draw other weights, but not load others. The data follow the seed.
    loading = (*options, "--load", str(initial), "--finetune")
    assert jobs.run(tmp_path / "loaded", *loading).code == 0
    assert results(tmp_path / "loaded") == results(tmp_path / "seed")
    assert jobs.run(tmp_path / "other", *options, "--seed", "7").code == 0
    assert jobs.run(tmp_path / "other-loaded", *loading, "--seed", "7").code == 0
    first, loaded = results(tmp_path / "other")[0], results(tmp_path / "other-loaded")[0]
    assert first != loaded
    assert sorted(path.stat().st_mtime_ns for path in initial.rglob("*")) == before


@pytest.mark.full
@pytest.mark.parametrize(
    "precision", [pytest.param((), marks=pytest.mark.full), ("--bf16",)], ids=["fp32", "bf16"]
)
def test_sgd_resumes_with_its_momentum(jobs: JobServer, tmp_path: Path, precision: tuple[str, ...]) -> None:
    options = ("--optimizer", "sgd", "--lr-decay-iters", "4", *precision)
    assert jobs.run(tmp_path / "whole", *options, "--train-iters", "4").code == 0
    assert jobs.run(tmp_path / "first", *options, "--train-iters", "2").code == 0
    load = ("--load", str(tmp_path / "first" / "checkpoints"))
    resumed = jobs.run(tmp_path / "second", *options, "--train-iters", "4", *load)
    assert resumed.code == 0, resumed.output
    assert results(tmp_path / "first") + results(tmp_path / "second") == results(tmp_path / "whole")
    assert_refused(
        jobs.run(tmp_path / "sharded", *options, "--use-distributed-optimizer"),
        "--use-distributed-optimizer is for --optimizer adam in Megatron; omit one of them",
    )


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_refused_and_kept(jobs: JobServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert jobs.run(run, "--train-iters", "2", "--bf16").code == 0
    checkpoints = run / "checkpoints"
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    load = ("--load", str(checkpoints))
    wrong = jobs.run(tmp_path / "a", *load, "--hidden-size", "64", "--bf16", "--finetune")
    assert_refused(wrong, "does not fit: hidden_size is 64 here and 32 there; use the same model")
    # Master weights and moments belong to the precision, the weights do not.
    wrong = jobs.run(tmp_path / "b", *load)
    assert_refused(wrong, "bf16 is False here and True there; add --no-load-optim or --finetune")
    assert (
        jobs.run(tmp_path / "c", *load, "--finetune", "--train-iters", "1", "--lr-warmup-iters", "0").code
        == 0
    )
    assert_refused(
        jobs.run(tmp_path / "d", *load, "--ckpt-step", "9"), "iter_0000009 is not whole: it is missing"
    )
    assert {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()} == before
    metadata = checkpoints / "iter_0000002" / "metadata.json"
    metadata.write_bytes(b"\xff\xfe")
    assert_refused(jobs.run(tmp_path / "e", *load), "is whole (iter_0000002: metadata.json has 2 bytes")
    (checkpoints / "iter_0000002" / manifest.NAME).unlink()
    assert_refused(jobs.run(tmp_path / "e", *load), f"checkpoint {metadata.parent} cannot be read")
    (checkpoints / "iter_0000002" / "common.pt").write_bytes(b"broken")
    assert_refused(jobs.run(tmp_path / "e", *load), "cannot be read")
    shutil.rmtree(checkpoints / "iter_0000002")
    assert_refused(jobs.run(tmp_path / "f", *load), "is whole (iter_0000002: it is missing)")
    assert not list(tmp_path.glob("[abdef]"))  # refused before a folder was made


@pytest.mark.full
def test_damaged_weights_are_refused_or_passed_over(jobs: JobServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert jobs.run(run, "--exit-interval", "4").code == 0
    checkpoints = run / "checkpoints"
    weights = checkpoints / "iter_0000004" / "__0_0.distcp"
    whole = weights.read_bytes()
    listed = (weights.parent / manifest.NAME).read_bytes()
    (weights.parent / manifest.NAME).unlink()  # as Megatron writes it without this library
    for damaged in (whole[: len(whole) // 2], b""):
        weights.write_bytes(damaged)
        finished = jobs.run(run)
        assert finished.code == 2, finished.output
        assert f"checkpoint {weights.parent} cannot be read, its files are damaged (" in finished.output
        assert f"--load {checkpoints} --ckpt-step, which has: [2]" in finished.output
        assert "Traceback" not in finished.output
        assert finished.output.count("pretrain_dsa.py:") == 1
    (weights.parent / manifest.NAME).write_bytes(listed)
    finished = jobs.run(run)
    assert finished.code == 0, finished.output
    assert f"resuming the unfinished run in {run} from step 2" in finished.output
    assert f"passed over: iter_0000004: __0_0.distcp has 0 bytes of {len(whole)}" in finished.output
    assert weights.read_bytes() == whole


@pytest.mark.full
def test_checkpoints_are_not_replaced_by_another_job(jobs: JobServer, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = ("--save", str(saved), "--train-iters", "2")
    first = jobs.run(tmp_path / "a", *options)
    assert first.code == 0, first.output
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    message = f"--save {saved} holds checkpoints up to step 2, which this job would replace"
    for more in ([], ["--load", str(saved), "--finetune"], ["--train-iters", "0", "--lr-warmup-iters", "0"]):
        assert_refused(jobs.run(tmp_path / "b", *options, *more), message)
    assert not (tmp_path / "b").exists()
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before
    onwards = jobs.run(tmp_path / "b", *options, "--load", str(saved), "--train-iters", "4")
    assert onwards.code == 0, onwards.output
    assert [record["step"] for record in records(tmp_path / "b")] == [3, 4]
    assert [record["step"] for record in records(tmp_path / "b", "heldout.jsonl")] == [2, 3, 4]
    assert complete_steps(saved) == [2, 4]


@pytest.mark.full
def test_a_loaded_checkpoint_is_never_written_again(jobs: JobServer, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = ("--save", str(saved), "--load", str(saved))
    assert jobs.run(tmp_path / "a", "--save", str(saved), "--train-iters", "2").code == 0
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in saved.rglob("*.*")}
    # Nothing is left to train: a save of only the weights, or of the same state, would replace the
    # checkpoint.
    refused = jobs.run(tmp_path / "b", *options, "--train-iters", "0")
    assert_refused(refused, f"--save {saved} holds checkpoints up to step 2, which this job would replace")
    for number, more in enumerate(
        (["2"], ["1", "--lr-warmup-iters", "0"], ["2", "--no-save-optim", "--no-load-optim"])
    ):
        finished = jobs.run(tmp_path / f"again-{number}", *options, "--train-iters", *more)
        assert finished.code == 0, finished.output
        without = f"checkpoint: {saved} provides the weights only; the optimizer starts without its state"
        assert (without in finished.output) == ("--no-load-optim" in more)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in saved.rglob("*.*")} == before


@pytest.mark.full
def test_a_run_with_a_checkpoint_folder_of_its_own_goes_on(jobs: JobServer, tmp_path: Path) -> None:
    saved, run = tmp_path / "saved", tmp_path / "run"
    assert jobs.run(run, "--save", str(saved), "--exit-interval", "2").code == 0
    finished = jobs.run(run, "--save", str(saved))
    assert finished.code == 0, finished.output
    assert f"resuming the unfinished run in {run} from step 2" in finished.output
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6]
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "/nowhere"], "/nowhere does not exist"),
        (["--data", "{binary}"], "is no text"),
        (["--data", "{short}"], "a part of 5.0% of them (--split 95,5) is too little for sequences of 32"),
        (["--tokenizer-model", "{binary}"], "is not a tokenizer.json"),
        (["--load", "{folder}"], "has no complete checkpoint; complete ones: none"),
        (["--output-dir", "{binary}/run"], "cannot be used"),
        (["--lerning-rate", "1"], "--lerning-rate is no flag of this job"),
        (["--seq-length", "many"], "invalid int value: 'many'"),
        (["--dsa-indexer-rope-frist"], "did you mean --dsa-indexer-rope-first"),
    ],
)
def test_bad_input_is_refused_before_a_process_group(
    jobs: JobServer, tmp_path: Path, flags: list[str], message: str
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\0\1\2")
    (tmp_path / "short").write_text("short\n" * 20)
    (tmp_path / "folder").mkdir()
    given = [flag.format(**{path.name: path for path in tmp_path.iterdir()}) for flag in flags]
    assert_refused(jobs.run(tmp_path / "run", *given), message)
    assert not (tmp_path / "run").exists()


SHARING = ("--num-layers", "4", "--dsa-indexer-topk-freq", "4", "--dsa-indexer-skip-topk-offset", "3")
"""Flags of a model whose last layer of four has no indexer."""


@pytest.mark.full
def test_layers_share_a_selection(jobs: JobServer, tmp_path: Path) -> None:
    """The job names the selecting layers, counts them at its end, and resumes as if uninterrupted."""
    whole = jobs.run(tmp_path / "whole", *SHARING, "--train-iters", "4")
    assert whole.code == 0, whole.output
    assert "choose 8 of up to 32 keys in layers 1, 2, 3; the others attend to the same" in whole.output
    assert "calls in 4 layers, of which 3 select keys, on rank 0" in whole.output
    assert all(record["indexer_loss"] > 0 for record in records(tmp_path / "whole"))
    load = ("--load", str(tmp_path / "whole" / "checkpoints"), "--train-iters", "4")
    resumed = jobs.run(tmp_path / "resumed", *SHARING, *load, "--ckpt-step", "2")
    assert resumed.code == 0, resumed.output
    assert results(tmp_path / "resumed") == results(tmp_path / "whole")[2:]
    assert_refused(
        jobs.run(tmp_path / "all", "--num-layers", "4", *load),
        "does not fit: layer 4 selects keys here and shares those of layer 3 there; use the same "
        "--dsa-indexer-topk-freq",
    )
