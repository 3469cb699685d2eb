"""Recording during training: back-pressure, contents, full disks, and refused settings."""

from __future__ import annotations

import os
import sys
import textwrap
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_dsa import log
from mindspeed_dsa.features.dsa.selections import record as recording
from mindspeed_dsa.features.dsa.selections.feature import (
    RECORDED_SELECTIONS,
    Numbers,
    Options,
    check_selections,
    header_of,
)
from mindspeed_dsa.features.dsa.selections.format import Header, Key, Recording
from mindspeed_dsa.features.dsa.selections.record import EXIT_STATUS, Recorder
from mindspeed_dsa.megatron.selection_source import Chosen, LayerRows, RowRun
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from tests.support import warm

TOPK, LENGTH = 3, 8
HEADER = Header(TOPK, 2, 0, (1, 2))


def rows(layer: int = 1, runs=((0, LENGTH, 0, LENGTH),), batch: int = 1) -> LayerRows:
    count = max(end for _, end, _, _ in runs)
    return LayerRows(layer, lambda: [RowRun(*run) for run in runs], batch, count, LENGTH, TOPK)


def selection(batch: int = 1, seed: int = 0, low: int = 0, length: int = LENGTH) -> torch.Tensor:
    random = np.random.default_rng(seed)
    out = np.full((batch, length, TOPK), -1, np.int32)
    # Row r sees r + 1 keys.
    for sequence in out:
        for row in range(length):
            count = min(TOPK, row + 1)
            sequence[row, :count] = np.sort(random.permutation(row + 1)[:count]) + low
    return torch.from_numpy(out)


def a_recorder(folder, **options) -> Recorder:
    return Recorder(Options(record=folder, **options), HEADER, 0, log.get("test", "megatron"))


def test_everything_taken_is_on_disk_after_a_flush(tmp_path):
    recorder, topk_indices = a_recorder(tmp_path), selection(2)
    for layer in (1, 2):
        recorder.take(Key(1, 4, layer), rows(layer, batch=2), Chosen((topk_indices,)))
    recorder.flush()
    reopened = Recording.open(tmp_path)
    assert reopened.places() == [Key(1, sequence, layer) for sequence in (4, 5) for layer in (1, 2)]
    assert np.array_equal(reopened.array(1, 5)[:, 0], topk_indices[1].numpy())
    assert recorder.records == 4
    recorder.close()


def test_rows_of_documents_and_dense_ones(tmp_path):
    recorder = a_recorder(tmp_path)
    runs = ((0, 5, 0, 5), (5, 8, 5, 8), (8, 9, 0, 0))  # the last row is padding
    whole = torch.cat([selection(length=5), selection(low=5, length=3), torch.full((1, 1, TOPK), -1)], dim=1)
    recorder.take(Key(1, 0, 1), rows(1, runs), Chosen((whole.int(),)))
    by_run = (selection(length=5), None, None)  # the second document is as long as topk, so it is dense
    recorder.take(Key(1, 0, 2), rows(2, runs), Chosen(by_run, by_run=True))
    recorder.close()
    array = Recording.open(tmp_path).array(1, 0)
    # Documents are recorded with positions of their own.
    expected = np.concatenate([selection(length=5)[0].numpy(), selection(length=3)[0].numpy()])
    assert np.array_equal(array[:, 0], expected)
    assert np.array_equal(array[:, 1], expected)


def test_only_what_was_asked_for(tmp_path):
    recorder = a_recorder(tmp_path, layers=Numbers.of("2"), rows=Numbers.of("1-2,6-"))
    for layer in (1, 2):
        recorder.take(Key(1, 0, layer), rows(layer), Chosen((selection(),)))
    recorder.close()
    found = Recording.open(tmp_path)
    assert found.places() == [Key(1, 0, 2)]
    assert found.rows(Key(1, 0, 2)).positions.tolist() == [1, 2, 6, 7]


def test_shares_follow_the_keys_into_order(tmp_path):
    recorder = a_recorder(tmp_path, mass=True)
    keys = torch.tensor([[[0, -1, -1], [1, 0, -1], [2, 0, 1], [3, 1, 0]]], dtype=torch.int32)
    mass = torch.tensor([[[1.0, 0, 0], [0.75, 0.25, 0], [0.5, 0.125, 0.375], [0.5, 0.25, 0.25]]])
    recorder.take(Key(1, 0, 1), rows(1, ((0, 4, 0, 4),)), Chosen((keys,)), mass)
    recorder.close()
    found = Recording.open(tmp_path).rows(Key(1, 0, 1))
    assert found.keys[2].tolist() == [0, 1, 2]
    assert found.mass[2].tolist() == [0.125, 0.375, 0.5]


def test_memory_is_bounded(tmp_path, monkeypatch):
    most = []
    # Three selections fit, so the recorder has to wait for the disk.
    monkeypatch.setattr(recording, "_MOST_BYTES", 3 * selection().nbytes)
    recorder = a_recorder(tmp_path)
    write = recorder._write

    def slowly(piece):
        most.append(recorder._bytes)
        write(piece)

    monkeypatch.setattr(recorder, "_write", slowly)
    for step in range(1, 60):
        recorder.take(Key(step, 0, 1), rows(), Chosen((selection(),)))
    recorder.close()
    assert len(Recording.open(tmp_path).places()) == 59
    assert max(most) <= 4 * selection().nbytes


@pytest.mark.parametrize(
    ("max_restarts", "restarts", "raises", "status"),
    [(0, 0, "", EXIT_STATUS), (3, 1, "", 0), (3, 3, "", EXIT_STATUS), (3, 1, "raise ValueError", 1)],
)
def test_a_full_disk_ends_the_recording_and_not_the_training(
    max_restarts, restarts, raises, status, tmp_path
):
    script = textwrap.dedent(f"""
        import resource
        from tests.features.dsa.selections.test_record import *
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        from pathlib import Path
        recorder = a_recorder(Path({str(tmp_path)!r}))
        for step in range(1, 100):
            recorder.take(Key(step, 0, 1), rows(), Chosen((selection(),)))
        recorder.flush()
        print("trained", flush=True)
        {raises}
    """)
    # torchrun tells how many restarts are left.
    launched = {"TORCHELASTIC_MAX_RESTARTS": str(max_restarts), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    done = warm.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **launched},
    )
    assert done.returncode == status, done.stderr
    assert "trained" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "recording ends at step" in line]
    assert len(lines) == 1
    assert "File too large" in lines[0]
    reopened = Recording.open(tmp_path)
    assert not reopened.problems
    for place in reopened.places():
        assert reopened.rows(place) is not None


def test_whatever_ends_the_thread_training_goes_on(tmp_path, monkeypatch):
    # One selection fits, so a dead recorder would soon block training.
    monkeypatch.setattr(recording, "_MOST_BYTES", selection().nbytes)
    recorder = a_recorder(tmp_path)
    monkeypatch.setattr(recorder, "finish", lambda: None)
    monkeypatch.setattr(recorder, "_write", lambda piece: {}["a fault"])
    # In a thread, because a flush that waited for the dead recorder would never return.
    training = Thread(target=lambda: [take_steps(recorder, range(1, 6)), recorder.flush()], daemon=True)
    training.start()
    training.join(timeout=60)
    assert not training.is_alive()
    recorder.close()
    assert "a fault" in recorder.failed


def take_steps(recorder, steps):
    for step in steps:
        recorder.take(Key(step, 0, 1), rows(), Chosen((selection(seed=step),)))


def test_a_recorder_goes_on_after_it_was_closed(tmp_path):
    recorder = a_recorder(tmp_path)
    recorder.begin(1, 1)
    for layer in (1, 2):
        recorder.take(Key(1, 0, layer), rows(layer), Chosen((selection(),)))
        recorder.close()
    assert Recording.open(tmp_path).places() == [Key(1, 0, 1), Key(1, 0, 2)]


def test_a_job_cuts_off_what_it_does_again_before_it_records(tmp_path):
    for steps in ((1, 2, 3), (2,)):
        recorder = a_recorder(tmp_path)
        recorder.begin(1, steps[0])
        take_steps(recorder, steps)
        recorder.close()
    assert [place.step for place in Recording.open(tmp_path).places()] == [1, 2]


def test_tokens_may_be_overwritten_by_the_next_batch(tmp_path, monkeypatch):
    recorder, may_write = a_recorder(tmp_path), Event()
    # Writing waits until the tokens have been overwritten.
    write = recorder._write
    monkeypatch.setattr(recorder, "_write", lambda piece: [may_write.wait(60), write(piece)])
    tokens = torch.arange(LENGTH)[None]
    recorder.take(Key(1, 0, 1), replace(rows(), tokens=tokens), Chosen((selection(),)))
    tokens.zero_()
    may_write.set()
    recorder.close()
    assert Recording.open(tmp_path).rows(Key(1, 0, 1)).tokens.tolist() == list(range(LENGTH))


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("7", [7], [6, 8]),
        ("1-3,10", [1, 3, 10], [0, 4, 11]),
        ("5-", [5, 1000], [4]),
        ("1-9:4", [1, 5, 9], [2, 13]),
    ],
)
def test_numbers(text, inside, outside):
    numbers = Numbers.of(text)
    assert all(value in numbers for value in inside)
    assert not any(value in numbers for value in outside)


@pytest.mark.parametrize("text", ["", "x", "3-1", "1-2-3", "1:0", "-4"])
def test_no_numbers(text):
    with pytest.raises(ValueError, match="no number or range of numbers"):
        Numbers.of(text)


# -- checks --------------------------------------------------------------------------------------


def job(**changes) -> SimpleNamespace:
    unset = {
        flag.dest: flag.unset
        for flag in RECORDED_SELECTIONS.flags
        if flag.name.startswith(("--dsa-re", "--dsa-record"))
    }
    sizes = {"num_layers": 2, "dsa_indexer_topk": TOPK, "mtp_num_layers": None}
    fused = {"experimental_attention_variant": "dsa", "use_fused_dsa": True}
    return SimpleNamespace(**{**unset, **sizes, **fused, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"use_fused_dsa": False},
            "selections of Megatron's own operators stay in them; add --use-fused-dsa",
        ),
        ({"experimental_attention_variant": None}, "the model selects no keys"),
        ({"dsa_stage": "warmup"}, "--dsa-stage warmup attends to all keys"),
        ({"mtp_use_repeated_layer": True, "mtp_num_layers": 2}, "runs one layer several times"),
        ({"dsa_record_selections": __file__}, "is a file; name a folder"),
        ({"dsa_replay_selections": "/nowhere"}, "holds no recorded selections"),
        (
            {"allgather_cp": True, "context_parallel_size": 2},
            "has a piece of the whole pack, and not two chunks of each document",
        ),
        ({"cuda_graph_impl": "local"}, "attends to the keys of the step that it was captured in"),
    ],
)
def test_jobs_that_cannot(changes, words, tmp_path):
    args = job(**{"dsa_record_selections": str(tmp_path), **changes})
    problems = list(check_selections(args, None))
    assert [words in problem for problem in problems].count(True) == 1, problems


def test_whole_packs_of_one_rank_can(tmp_path):
    args = job(dsa_record_selections=str(tmp_path), allgather_cp=True, context_parallel_size=1)
    assert not list(check_selections(args, None))


def test_a_recording_of_another_model_is_refused_before_training(tmp_path):
    recorder = a_recorder(tmp_path)
    recorder.take(Key(1, 0, 1), rows(), Chosen((selection(),)))
    recorder.close()
    assert not list(check_selections(job(dsa_replay_selections=str(tmp_path)), None))
    (problem,) = check_selections(job(dsa_replay_selections=str(tmp_path), dsa_indexer_topk=8), None)
    assert "is of another model: topk is 3 in the recording and 8 in the model" in problem
    (problem,) = check_selections(job(dsa_record_selections=str(tmp_path), dsa_indexer_topk=8), None)
    assert "has selections of another model: topk is 3 in the recording and 8 in the model" in problem
    (problem,) = check_selections(
        job(dsa_replay_selections=str(tmp_path), dsa_record_selections=str(tmp_path)), None
    )
    assert "record into another one" in problem


@pytest.mark.parametrize(
    ("release", "changes", "missing"),
    [
        ("0.17.1", {}, None),
        ("0.17.1", {"train_iters": 4}, None),
        ("0.17.1", {"train_iters": 5}, 5),
        ("0.17.1", {"train_iters": 7}, 5),
        ("0.17.1", {"train_iters": 6, "iterations_to_skip": [5]}, None),
        ("0.16.1", {"train_iters": 6, "iterations_to_skip": [5]}, 5),
        ("0.16.1", {"train_iters": 6, "iterations_to_skip": [4]}, None),
        ("0.17.1", {"train_iters": 7, "dsa_replay_missing": "select"}, None),
        ("0.17.1", {"train_iters": 7, "exit_interval": 4}, None),
        ("0.17.1", {"train_iters": 6, "load": "reached"}, None),
        ("0.17.1", {"train_iters": 6, "load": "reached", "finetune": True}, 5),
        ("0.17.1", {"train_iters": 6, "load": "reached", "ckpt_step": 4}, 5),
    ],
)
def test_a_recording_that_lacks_a_step_of_the_job_is_refused_before_training(
    monkeypatch, tmp_path, release, changes, missing
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reached").mkdir()
    (tmp_path / "reached" / "latest_checkpointed_iteration.txt").write_text("5")
    monkeypatch.setattr(versions, "of_megatron", lambda root: release)
    recorder = a_recorder(tmp_path / "recording")
    for step in (3, 4, 6):
        recorder.take(Key(step, 0, 1), rows(), Chosen((selection(),)))
    recorder.close()
    args = job(dsa_replay_selections=str(tmp_path / "recording"), **changes)
    problems = list(check_selections(args, None))
    assert [f"has no step {missing}, and the job trains to" in problem for problem in problems] == (
        [] if missing is None else [True]
    )


@pytest.mark.parametrize(
    ("release", "ranks", "refused"), [("0.19.0", 2, True), ("0.18.2", 2, False), ("0.19.0", 1, False)]
)
@pytest.mark.parametrize("packs", ["sft", "dataloader_inter_document_masking"])
def test_packs_of_megatrons_own_attention_are_refused(monkeypatch, tmp_path, release, ranks, refused, packs):
    monkeypatch.setattr(versions, "of_megatron", lambda root: release)
    args = job(dsa_record_selections=str(tmp_path), context_parallel_size=ranks, **{packs: True})
    problems = list(check_selections(args, None))
    assert any("attends itself to packs" in problem for problem in problems) is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dsa_record_selections_rows": Numbers.of("1")},
            "-rows records nothing without --dsa-record-selections",
        ),
        ({"dsa_record_selections_mass": True}, "-mass records nothing without --dsa-record-selections"),
        ({"dsa_replay_missing": "select"}, "--dsa-replay-missing select is for --dsa-replay-selections"),
    ],
)
def test_flags_that_belong_to_others(changes, words):
    args = job(**changes)
    assert RECORDED_SELECTIONS.is_active(args)
    with pytest.raises(SettingsError, match=words):
        Options.of(args)


def test_layers_that_select():
    args = job(num_layers=8, mtp_num_layers=1, dsa_indexer_topk_freq=4, dsa_indexer_skip_topk_offset=3)
    assert header_of(args) == Header(TOPK, 8, 1, (1, 2, 3, 7, 9))
