"""One record per step, from a training loop that does not know of the feature."""

from __future__ import annotations

import json
import shutil
import sys
import time
from importlib import import_module
from types import SimpleNamespace

import pytest

import mindspeed_dsa
from mindspeed_dsa import session
from tests.support import training_loop as loop

KEYS = {
    "step",
    "lm_loss",
    "indexer_loss",
    "grad_norm",
    "tokens_per_s",
    "step_time_s",
    "peak_memory_bytes",
}


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("megatron", loop.LOGS, indirect=True)
@pytest.mark.parametrize("imported_first", [True, False])
def test_every_step_is_recorded_in_old_and_new_releases(megatron, tmp_path, imported_first):
    file = tmp_path / "new" / "metrics.jsonl"
    if imported_first:
        import_module(f"{megatron}.training.training")
    mindspeed_dsa.enable(step_metrics_file=str(file))
    training = import_module(f"{megatron}.training.training")
    assert training.train(3) == "kept"

    written = records(file)
    assert all(set(record) == KEYS for record in written)
    assert [record["step"] for record in written] == [1, 2, 3]
    assert [record["lm_loss"] for record in written] == [4.0, 3.0, 2.0]
    assert [record["grad_norm"] for record in written] == [0.25, 0.5, 0.75]
    for record in written:
        assert record["tokens_per_s"] * record["step_time_s"] == pytest.approx(4 * 32)
        assert record["peak_memory_bytes"] > 2**20


def test_training_outlives_a_file_that_cannot_be_written(megatron, tmp_path, caplog):
    """A folder takes the file's place during training."""
    file = tmp_path / "metrics.jsonl"
    mindspeed_dsa.enable(step_metrics_file=str(file))
    training = import_module(f"{megatron}.training.training")
    training.train(1)
    file.unlink()
    file.mkdir()
    assert training.train(3) == "kept"
    assert f"{file} lacks steps: Is a directory" in caplog.text


def test_the_indexer_loss_is_the_steps_own_and_megatrons_sum_stays(megatron, tmp_path):
    training = import_module(f"{megatron}.training.training")
    training.train(5)
    untouched, training.LOGGED = training.LOGGED, []
    file = tmp_path / "metrics.jsonl"
    mindspeed_dsa.enable(step_metrics_file=str(file))
    training.train(5)
    assert [record["indexer_loss"] for record in records(file)] == [0.25, 0.5, 0.75, 1.0, 1.25]
    # Megatron's own sums run over an interval of two steps.
    assert training.LOGGED == untouched == [0.25, 0.75, 0.75, 1.75, 1.25]


def test_what_lies_between_steps_does_not_count(megatron, tmp_path, monkeypatch):
    # The fake clock advances only in the pauses and in reads.
    file, clock = tmp_path / "metrics.jsonl", [100.0]
    mindspeed_dsa.enable(step_metrics_file=str(file))

    def sleep(seconds):
        clock[0] += seconds

    def read():
        clock[0] += 0.125
        return clock[0]

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", read)
    import_module(f"{megatron}.training.training").train(2, pause_s=1.0)
    assert [record["step_time_s"] for record in records(file)] == [0.125, 0.125]


def test_a_second_job_appends(megatron, tmp_path):
    file = tmp_path / "metrics.jsonl"
    training = import_module(f"{megatron}.training.training")
    for _ in range(2):
        with mindspeed_dsa.enabled(step_metrics_file=str(file)):
            training.train(2)
    training.train(2)  # the feature is off again, so nothing is written
    assert [record["step"] for record in records(file)] == [1, 2, 1, 2]


def test_two_megatrons_in_one_process_are_recorded_apart(megatron, tmp_path):
    """Two sessions in one process record steps at the same time, each its own."""
    loop.write(tmp_path, root="other_megatron")
    sessions, jobs = [], []
    try:
        for root in (megatron, "other_megatron"):
            file = tmp_path / f"{root}.jsonl"
            started = session.Session(
                *session.resolve({"megatron_root": root, "step_metrics_file": str(file)}, [])
            )
            started.arm()
            sessions.append(started)
            jobs.append(import_module(f"{root}.training.training"))
        # Both jobs run a step before either one logs.
        figures = [job.train_step(None, step) for step, job in enumerate(jobs, 1)]
        for job, samples in zip(jobs, (4, 8), strict=True):
            job.get_args().consumed_train_samples += samples
        for job, (losses, grad_norm) in zip(jobs, figures, strict=True):
            job.training_log(losses, {}, 1e-3, 1, 1.0, None, 0, grad_norm)
    finally:
        for each in sessions:
            each.undo()
        for name in [name for name in sys.modules if name.partition(".")[0] == "other_megatron"]:
            del sys.modules[name]
    first, second = (records(tmp_path / f"{root}.jsonl") for root in (megatron, "other_megatron"))
    assert [(r["lm_loss"], r["indexer_loss"], r["grad_norm"]) for r in first] == [(4.0, 0.25, 0.25)]
    assert [(r["lm_loss"], r["indexer_loss"], r["grad_norm"]) for r in second] == [(3.0, 0.5, 0.5)]
    for found, samples in ((first, 4), (second, 8)):
        assert found[0]["tokens_per_s"] * found[0]["step_time_s"] == pytest.approx(samples * 32)


def test_a_job_without_megatrons_loop_is_refused(megatron, tmp_path):
    mindspeed_dsa.enable(step_metrics_file=str(tmp_path / "metrics.jsonl"))
    with pytest.raises(
        mindspeed_dsa.MindSpeedDSAError, match="--step-metrics-file records Megatron-LM's own"
    ):
        mindspeed_dsa.finalize()


def test_problems_are_reported_before_the_job_starts(megatron, tmp_path):
    shutil.rmtree(tmp_path / megatron / "training")
    mindspeed_dsa.enable(step_metrics_file=str(tmp_path))
    with pytest.raises(mindspeed_dsa.SettingsError) as refusal:
        mindspeed_dsa.validate(SimpleNamespace())
    assert "omit the flag" in str(refusal.value)
    assert f"{tmp_path} is a folder" in str(refusal.value)
