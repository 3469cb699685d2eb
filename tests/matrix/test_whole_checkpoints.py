"""Megatron-LM's own loop with damaged checkpoints: the next ten steps equal the unbroken run's."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mindspeed_dsa.patches import versions
from mindspeed_dsa.runs import expert_placement
from mindspeed_dsa.runs.expert_placement import Placement
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, iterations, name_of, state_of, tracked
from tests.matrix.record import Note
from tests.matrix.test_pretrain_gpt import LAYOUT, checkout, pretrain
from tests.matrix.test_weights_in_training import CHECKPOINTS

pytestmark = [
    pytest.mark.releases(">=0.12.1"),
    pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release"),
]

SAVED = (4, 8, 12, 14)
LATE_S = 3
WAYS = ("torch_dist", "torch", "torch_dist --async-save") if CHECKPOINTS else ("torch",)
"""Checkpoint formats; the first is in the table of releases."""


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.full) for way in WAYS[1:])])
def test_the_next_ten_steps_are_those_of_the_unbroken_run(way: str, note: Note, tmp_path: Path) -> None:
    """One shard is truncated, one has a flipped bit, one is missing; the intact save is 4 steps old."""
    note.begins("pretrain_gpt.py, TP2+SP", "whole-checkpoints")
    folder = tmp_path / "checkpoints"
    flags = f"--verify-checkpoint --ckpt-format {way} --save {folder} --save-interval 4"
    unbroken = pretrain(tmp_path / "unbroken", flags, steps=SAVED[-1])
    shards = {}
    for iteration in SAVED:
        state = state_of(folder, iteration, contents=True)
        assert state.damage == ""
        assert state.listed is not None
        largest = max(state.listed.files, key=lambda name: state.listed.files[name].size)
        shards[iteration] = state.path / largest
    assert tracked(folder) == (SAVED[-1], "")
    content = bytearray(shards[8].read_bytes())
    content[len(content) // 2] ^= 1
    shards[8].write_bytes(content)
    shards[12].unlink()
    shards[14].write_bytes(shards[14].read_bytes()[:-1])
    resumed = pretrain(tmp_path / "resumed", f"{flags} --load {folder}", steps=SAVED[-1])
    assert [record["step"] for record in resumed["steps"]] == list(range(5, SAVED[-1] + 1))
    for mine, theirs in zip(resumed["steps"], unbroken["steps"][4:], strict=True):
        for figure in ("lm_loss", "indexer_loss", "grad_norm"):
            assert mine[figure] == theirs[figure]
    assert state_of(folder, SAVED[-1], contents=True).damage == ""
    note.trained([resumed])


@pytest.mark.full
@pytest.mark.timeout(1100)
def test_ramp_and_loss_scale_go_on(note: Note, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 the scale doubles every other step, and batches grow after the loaded step."""
    note.begins("pretrain_gpt.py, TP2+SP", "whole-checkpoints")
    folder = tmp_path / "checkpoints"
    without(["--train-iters", "--lr-decay-iters", "--lr-warmup-iters"], tmp_path / "argv", monkeypatch)
    flags = f"--whole-checkpoints --ckpt-format torch_dist --save {folder} --save-interval 3"
    flags += " --train-samples 92 --lr-decay-samples 92 --lr-warmup-samples 16 --rampup-batch-size 4 4 24"
    flags += " --fp16 --initial-loss-scale 4096 --loss-scale-window 2"
    unbroken = pretrain(tmp_path / "unbroken", flags)
    last = unbroken["steps"][-1]["step"]
    assert last >= 3 + 10
    assert last > 92 // 8 + 1, "every batch was whole"
    whole = tensors(folder / name_of(last))
    for iteration in iterations(folder):
        if iteration != 3:
            shutil.rmtree(folder / name_of(iteration))
    (folder / TRACKER).write_text("3")
    resumed = pretrain(tmp_path / "resumed", f"{flags} --load {folder}")
    assert [record["step"] for record in resumed["steps"]] == list(range(4, last + 1))
    for mine, theirs in zip(resumed["steps"], unbroken["steps"][3:], strict=True):
        for figure in ("lm_loss", "indexer_loss", "grad_norm"):
            assert mine[figure] == theirs[figure]
    again = tensors(folder / name_of(last))
    assert again.keys() == whole.keys()
    assert [key for key in whole if not torch.equal(whole[key], again[key])] == []
    note.trained([resumed])


def without(flags: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove flags with one value each from the command lines of ranks started from now on."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        f"for flag in {flags!r}:\n"
        "    while flag in sys.argv and any('run_megatron' in each for each in sys.argv[:1]):\n"
        "        at = sys.argv.index(flag)\n"
        "        del sys.argv[at : at + 2]\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(folder))


BALANCED = "--balanced-moe-experts"
FEATURES = {
    "reuse-fp32-param": "--bf16 --reuse-fp32-param",
    "swap-optimizer": "--bf16 --swap-optimizer",
    "virtual-optimizer": "--bf16 --virtual-optimizer 0.001",
    "fsdp2": "--bf16 --use-torch-fsdp2",
    "moe-grouped-gemm": "--moe-grouped-gemm",
    "moe-expert-placement": "--moe-expert-placement {placement}",
    "balanced-moe-experts": f"{BALANCED} --balanced-moe-matmul-rate 0.001 --balanced-moe-link-rate 999",
    "moe-router-load-report": "--moe-router-load-report {report}",
    "pack-documents": "--pack-documents --micro-batch-size 1 --use-fused-dsa",
}
EP = "--expert-model-parallel-size 2"
LAYOUTS = {"fsdp2": "", "moe-expert-placement": EP, "balanced-moe-experts": EP}


@pytest.mark.full
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("name", FEATURES)
def test_an_asynchronous_save_has_the_tensors_of_a_synchronous_one(
    name: str, note: Note, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is late: by then, steps have changed in place the tensors that features keep elsewhere."""
    layout = LAYOUTS.get(name, LAYOUT)
    if note.begins("pretrain_gpt.py, TP2+SP", name, switches={name.replace("-", "_"): True}):
        return
    placement = tmp_path / "placement.json"
    expert_placement.write(placement, Placement(4, 2, dict.fromkeys((2, 3, 4), (2, 0, 3, 1))))
    flags = FEATURES[name].format(placement=placement, report=tmp_path / "report")
    flags += " --whole-checkpoints --ckpt-format torch_dist --save-interval 2 --num-workers 0"
    forks = late_forks(tmp_path / "late", monkeypatch)
    saved, forked = [], [0]
    for way in ("", asynchronous()):
        folder = tmp_path / f"checkpoints{len(saved)}"
        ran = pretrain(tmp_path / f"run{len(saved)}", f"{flags} --save {folder} {way}", layout, steps=4)
        assert name in ran["at work"]
        assert [state_of(folder, iteration, contents=True).damage for iteration in (2, 4)] == ["", ""]
        saved.append([tensors(folder / name_of(iteration)) for iteration in (2, 4)])
        forked.append(len(forks.read_bytes()))
    _, at_once, altogether = forked
    assert altogether - at_once >= at_once + 4, "two ranks save twice, and each save has a process more"
    for there, here in zip(*saved, strict=True):
        assert there.keys() == here.keys()
        assert [key for key in there if not torch.equal(there[key], here[key])] == []
    note.trained([ran])


def asynchronous() -> str:
    """Return flags of asynchronous saves; without the second, Megatron-LM >= 0.16 undoes the first."""
    strategy = "--async-strategy mcore" if Version(versions.of_megatron() or "0") >= Version("0.18") else ""
    return f"--async-save --use-persistent-ckpt-worker {strategy}"


def late_forks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Delay all forked processes of later programs; return a file with one byte for each fork."""
    folder.mkdir()
    forks = folder / "forks"
    forks.touch()
    (folder / "sitecustomize.py").write_text(
        "import os, time\n"
        "def late():\n"
        f"    with open({str(forks)!r}, 'a') as file:\n"
        "        file.write('.')\n"
        f"    time.sleep({LATE_S})\n"
        "os.register_at_fork(after_in_child=late)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(folder))
    return forks


def tensors(checkpoint: Path) -> dict[Any, torch.Tensor]:
    """Read all tensor shards without Megatron."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    read = {}
    for index, place in metadata.storage_data.items():
        # Other objects hold the paths of their run, and would differ.
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            content = (checkpoint / place.relative_path).read_bytes()[
                place.offset : place.offset + place.length
            ]
            read[index.fqn, tuple(index.offset)] = torch.load(io.BytesIO(content), weights_only=True)
    assert read
    return read
