"""``--save-hf``: models that are rewritten, and files of the source folder that are published."""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import mindspeed_dsa
from mindspeed_dsa import log
from mindspeed_dsa.features.checkpoints.hugging_face import companions, saving
from mindspeed_dsa.features.checkpoints.hugging_face.feature import SAVE, Save
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.whole_checkpoints import TRACKER
from mindspeed_dsa.tools.weights.model import release_here
from tests.features.checkpoints.hugging_face import models as tiny
from tests.tools.weights import models
from tests.tools.weights.models import FILE, done, weights

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return two models of the same shape, and the checkpoint of the first."""
    folder = tmp_path_factory.mktemp("made")
    first, second = (
        models.write("deepseek_v32", folder / name, num_hidden_layers=1) for name in ("first", "second")
    )
    done("import", first, folder / "checkpoints")
    return first, second, folder / "checkpoints"


@pytest.fixture
def model(made: tuple[Path, Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "model"))


# -- a step that is trained again --------------------------------------------------------------


def step_of(model: Path, folder: Path) -> Namespace:
    """Make a model the checkpoint of step 3; return the arguments of the job that saved it."""
    done("import", model, folder / "imported")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "imported" / "release").rename(folder / "imported" / "iter_0000003")
    (folder / "imported").rename(folder / "checkpoints")
    (folder / "checkpoints" / TRACKER).write_text("3")
    checkpoint = folder / "checkpoints" / "iter_0000003"
    common: dict[str, Any] = torch.load(checkpoint / "common.pt", weights_only=False)
    args: Namespace = common["args"]
    args.save = str(folder / "checkpoints")
    return args


def options(folder: Path, like: Path | None = None) -> Save:
    return Save(folder / "models", 0, False, like, release_here())


def is_model(folder: Path, model: Path) -> bool:
    return models.same(models.tensors_of(folder / "models" / "iter_0000003"), models.tensors_of(model))


def test_a_step_that_is_trained_anew_replaces_its_model(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    first, second, _ = made
    wanted = options(tmp_path)
    job = step_of(first, tmp_path)
    assert saving.export(job, 3, wanted, log.get()) == wanted.folder / "iter_0000003"
    assert is_model(tmp_path, first)
    written = (wanted.folder / "iter_0000003" / FILE).stat()
    assert saving.export(job, 3, wanted, log.get()) is None, "it is younger than the checkpoint"
    assert (wanted.folder / "iter_0000003" / FILE).stat().st_ino == written.st_ino
    job = step_of(second, tmp_path)
    assert saving.export(job, 3, wanted, log.get()) is not None
    assert is_model(tmp_path, second)
    assert [path.name for path in wanted.folder.iterdir()] == ["iter_0000003"]
    assert saving.export(job, 3, wanted, log.get()) is None


def test_a_model_stays_until_the_one_that_replaces_it_is_whole(
    made: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = made
    saving.export(step_of(first, tmp_path), 3, options(tmp_path), log.get())
    job = step_of(second, tmp_path)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.Plan, "publish", full)
    with pytest.raises(RunError, match="No space left on device; make room"):
        saving.export(job, 3, options(tmp_path), log.get())
    assert is_model(tmp_path, first)
    monkeypatch.undo()
    saving.export(job, 3, options(tmp_path), log.get())
    assert is_model(tmp_path, second)


def test_a_model_is_back_where_the_one_that_replaces_it_gets_no_name(
    made: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = made
    saving.export(step_of(first, tmp_path), 3, options(tmp_path), log.get())
    job, rename = step_of(second, tmp_path), os.rename

    def fails(old: Path, new: Path) -> None:
        if Path(old).name == ".iter_0000003.partial":
            raise OSError(5, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(RunError, match="Input/output error"):
        saving.export(job, 3, options(tmp_path), log.get())
    assert is_model(tmp_path, first)
    monkeypatch.undo()
    saving.export(job, 3, options(tmp_path), log.get())
    assert is_model(tmp_path, second)
    assert sorted(os.listdir(tmp_path / "models")) == ["iter_0000003"]


@pytest.mark.full
def test_a_replaced_model_that_cannot_be_deleted_is_said_and_the_new_one_stays(
    made: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, _ = made
    saving.export(step_of(first, tmp_path), 3, options(tmp_path), log.get())
    job, rmtree = step_of(second, tmp_path), shutil.rmtree

    def busy(path: Path, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith(".replaced"):
            raise OSError(16, "Device or resource busy")
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert saving.export(job, 3, options(tmp_path), log.get()) is not None
    assert is_model(tmp_path, second)
    assert ".replaced, which " in (said := capsys.readouterr().err)
    assert "cannot be deleted: [Errno 16] Device or resource busy" in said
    monkeypatch.undo()
    saving.export(step_of(first, tmp_path), 3, options(tmp_path), log.get())
    assert sorted(os.listdir(tmp_path / "models")) == ["iter_0000003"]


def test_what_is_no_model_is_not_replaced(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    mine = tmp_path / "models" / "iter_0000003" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("")
    with pytest.raises(
        RunError, match=r"models/iter_0000003 is no export of a job, .*give --save-hf another"
    ):
        saving.export(step_of(made[0], tmp_path), 3, options(tmp_path), log.get())
    assert mine.exists()


def test_another_jobs_model_is_not_replaced(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    job = step_of(made[0], tmp_path)
    assert saving.export(job, 3, options(tmp_path), log.get()) is not None
    assert saving.export(job, 3, options(tmp_path), log.get()) is None, "is there already"
    (tmp_path / "checkpoints").rename(tmp_path / "others")
    job.save = str(tmp_path / "others")
    with pytest.raises(RunError, match=rf"is of {tmp_path}/checkpoints, and not of {tmp_path}/others; give"):
        saving.export(job, 3, options(tmp_path), log.get())
    assert is_model(tmp_path, made[0])
    assert refused(tmp_path, train_iters=3) == []
    (said,) = refused(tmp_path, train_iters=3, save=job.save)
    assert f"iter_0000003 is of {tmp_path}/checkpoints, and not of {tmp_path}/others; give" in said


def refused(folder: Path, **job: Any) -> list[str]:
    """Return what a job with checkpoints in ``folder`` is refused before training."""
    own = {"save": str(folder / "checkpoints"), "save_hf": str(folder / "models"), **job}
    return SAVE.problems(Namespace(save_hf_fp8_blocks=False, load_hf=None, **{"save_hf_interval": 0, **own}))


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        ({"train_iters": 4}, [4]),
        ({"train_iters": 5}, []),
        ({"train_iters": 6, "save_hf_interval": 2}, [2, 4]),
        ({"save_hf_interval": 2}, [2, 4]),
        ({"train_iters": 6, "save_hf_interval": 2, "load": "reached"}, [4]),
        ({"train_iters": 6, "save_hf_interval": 2, "load": "reached", "finetune": True}, [2, 4]),
        ({"train_iters": 6, "save_hf_interval": 2, "load": "reached", "ckpt_step": 4}, []),
        ({"train_iters": 4, "load": "reached", "ckpt_step": 4}, [4]),
    ],
)
def test_folders_that_a_job_may_not_replace_are_refused_before_training(
    tmp_path: Path, job: dict[str, Any], steps: list[int]
) -> None:
    for step in (2, 4):
        (tmp_path / "models" / f"iter_{step:07}").mkdir(parents=True)
    (tmp_path / "reached").mkdir()
    (tmp_path / "reached" / TRACKER).write_text("2")
    job = {**job, **({"load": str(tmp_path / "reached")} if "load" in job else {})}
    names = [said.split("models/")[1].split()[0] for said in refused(tmp_path, **job)]
    assert names == [f"iter_{step:07}" for step in steps]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"save_hf": "checkpoints"}, "has the folders of --save's checkpoints; give it another folder"),
        ({"save": "msc://bucket/job"}, "reads checkpoints in a folder, and --save msc://bucket/job is none"),
        ({"tensor_parallel_num_weight_shards": 2}, "saves halves of gated weights in another order"),
        ({"expert_tensor_parallel_num_weight_shards": 2}, "saves halves of gated weights in another order"),
        ({"heterogeneous_layers_config_path": "layers.json"}, "knows layers of one size"),
    ],
)
def test_jobs_without_models_to_write_are_refused(tmp_path: Path, job: dict[str, Any], said: str) -> None:
    if job.get("save_hf"):
        job = {"save_hf": str(tmp_path / "checkpoints")}
    (problem,) = refused(tmp_path, **job)
    assert said in problem


def test_checkpoints_of_more_weight_shards_are_not_exported(
    made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    job = step_of(made[0], tmp_path)
    common = tmp_path / "checkpoints" / "iter_0000003" / "common.pt"
    job.tensor_parallel_num_weight_shards = 2
    torch.save({**torch.load(common, weights_only=False), "args": job}, common)
    status, text = weights("export", tmp_path / "checkpoints", tmp_path / "out")
    assert status == 2
    assert "has halves of gated weights in another order" in text
    assert not (tmp_path / "out").exists()


def test_training_goes_on_without_a_model_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Namespace(save=str(tmp_path / "checkpoints"))
    running: Any = Namespace(
        megatron=lambda name: Namespace(get_args=lambda: job),
        options=Save(tmp_path / "models", 2, fp8_blocks=True, like=Path("a model"), release="0.16.1"),
        log=log.get(),
    )
    steps: list[int] = []
    saved = saving.export_in_between(steps.append, running)
    with mock.patch.object(saving, "export", side_effect=RunError("no space left")) as export:
        for iteration in (1, 2):
            saved(iteration)
    assert steps == [1, 2]
    assert export.call_count == 1
    said = capsys.readouterr().err
    assert said.count("training goes on: `python -m mindspeed_dsa weights export") == 1
    folders = f"{tmp_path}/checkpoints/iter_0000002 {tmp_path}/models/iter_0000002"
    assert f"{folders} --like 'a model' --fp8-blocks` writes this model" in said


# -- links in a folder of unknown origin ---------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """Yield a private file of this machine."""
    (tmp_path / "secret").write_text(json.dumps({"key": "of somebody"}))
    return tmp_path / "secret"


def job_of(kind: str, **changed: Any) -> Namespace:
    """Return the arguments of a job with ``--save-hf``, as Megatron's validation leaves them."""
    own = {"save": "s", "save_hf": "out", "save_hf_interval": 0, "save_hf_fp8_blocks": False}
    trained = tiny.job(
        tiny.arguments(kind), release_here(), vocab_size=None, make_vocab_size_divisible_by=128, **own
    )
    return Namespace(**{**vars(trained), **changed})


@pytest.mark.parametrize("kind", [*tiny.KINDS, *tiny.GROUPED])
@pytest.mark.parametrize("like", [True, False])
def test_what_no_file_can_say_is_refused_before_training(tmp_path: Path, kind: str, like: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.config(kind)))
    load = {"load_hf": str(tmp_path)} if like else {}
    # Megatron pads the vocabulary when it builds the tokenizer, later.
    for vocabulary in ({}, {"padded_vocab_size": None}, {"padded_vocab_size": None, "vocab_size": 999}):
        assert SAVE.problems(job_of(kind, **load, **vocabulary)) == []
        (said,) = SAVE.problems(job_of(kind, **load, **vocabulary, swiglu=False, squared_relu=True))
        assert said.startswith("--save-hf out: mindspeed_dsa save-hf: the trained model as ")
        assert "squared_relu is True here and" in said
    assert SAVE.problems(job_of(kind, **load, ffn_hidden_size=None)) == [], "Megatron derives it"
    without = {key: value for key, value in vars(job_of(kind, **load)).items() if "vocab_size" not in key}
    assert SAVE.problems(Namespace(**without)) == [], "another loop than Megatron-LM's sets it with the data"


def test_a_session_refuses_what_no_file_can_say() -> None:
    values = {name: value for name, value in vars(job_of("qwen3")).items() if not name.startswith("save_hf")}
    with mindspeed_dsa.enabled(save_hf="out"):
        mindspeed_dsa.validate(Namespace(**values))
        with pytest.raises(SettingsError, match=r"save-hf: .*window_size is"):
            mindspeed_dsa.validate(Namespace(**{**values, "window_size": (127, 0)}))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "vocab.txt", FILE])
def test_links_out_of_the_folder_are_refused_by_name(
    made: tuple[Path, Path, Path], model: Path, tmp_path: Path, secret: Path, name: str
) -> None:
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("../secret")
    status, text = weights("export", made[2], tmp_path / "out", "--like", model)
    assert status == 2
    assert f"{model / name} is a link to {secret}, outside of that folder, and is not followed" in text
    assert "somebody" not in text
    assert not (tmp_path / "out").exists()
    job = SimpleNamespace(save_hf="out", save_hf_interval=0, save_hf_fp8_blocks=False, load_hf=str(model))
    problems = [each for each in SAVE.problems(SimpleNamespace(save="s", **vars(job))) if "is a link" in each]
    assert len(problems) == (name != FILE)  # weights are read, may be elsewhere, and are not published


def test_links_within_a_folder_and_those_of_the_cache_are_followed(
    made: tuple[Path, Path, Path], model: Path, tmp_path: Path, secret: Path
) -> None:
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "vocab.txt").symlink_to("tokenizer.json")
    done("export", made[2], tmp_path / "out", "--like", snapshot)
    assert (tmp_path / "out" / "vocab.txt").read_text() == "{}\n"
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()]
    assert models.same(models.tensors_of(tmp_path / "out"), models.tensors_of(made[0]))
    below = snapshot / "main" / "bf16"  # the model's folder among several in one repository
    below.mkdir(parents=True)
    for file in [path for path in snapshot.iterdir() if path.is_symlink()]:
        (below / file.name).symlink_to(Path("../..", os.readlink(file)))
    (below / "vocab.txt").unlink()
    assert list(companions.problems(below, weights=True)) == []
    (below / "merges.txt").symlink_to("../../config.json")
    assert list(companions.problems(below, weights=True)) == []
    (below / "vocab.txt").symlink_to(secret)
    assert [str(secret) in each for each in companions.problems(below, weights=True)] == [True]
    # A folder with the cache's layout may still link elsewhere.
    (cache / "blobs" / "aside").symlink_to(secret)
    (snapshot / "merges.txt").symlink_to("../../blobs/aside")
    status, text = weights("export", made[2], tmp_path / "again", "--like", snapshot)
    assert status == 2
    assert "merges.txt is a link to" in text
    (snapshot / "merges.txt").unlink()
    (cache / "blobs").rename(tmp_path / "elsewhere")
    (cache / "blobs").symlink_to("../elsewhere")
    status, text = weights("export", made[2], tmp_path / "again", "--like", snapshot)
    assert status == 2
    assert "tokenizer.json is a link to" in text
