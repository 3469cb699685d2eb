"""Invalid imports and exports are refused in one message, and leave nothing that looks complete."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.tools.weights import importing, job
from tests.tools.weights import models
from tests.tools.weights.models import FILE, done, weights

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

REMEDY = re.compile(r"\b(fetch|give|make|name|needs? no|remove|set|train|use)\b")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model's folder, with weights in FP8, and the checkpoint imported from it."""
    folder = tmp_path_factory.mktemp("made")
    model = models.quantise(models.write("deepseek_v32", folder / "model", num_hidden_layers=2))
    done("import", model, folder / "checkpoints")
    return model, folder / "checkpoints"


@pytest.fixture
def model(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "model"))


@pytest.fixture
def checkpoints(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "checkpoints"))


def refused(*words: object, says: tuple[str, ...], target: Path) -> str:
    """Require exit status 2 with one message that names the file and a remedy, and no target."""
    before = sorted(target.rglob("*")) if target.exists() else None
    status, text = weights(*words)
    assert status == 2, text
    assert "Traceback" not in text
    assert text.count("mindspeed_dsa") >= 1
    assert REMEDY.search(text), text
    missing = [each for each in says if each not in text]
    assert not missing, text
    if before is not None:
        assert sorted(target.rglob("*")) == before
    assert not (target / "release").exists() or target / "release" in (before or [])
    return text


# -- import ------------------------------------------------------------------------------------


def _cut(model: Path) -> tuple[str, ...]:
    os.truncate(model / FILE, (model / FILE).stat().st_size - 100)
    return FILE, "not fully covered"


def _lost(model: Path) -> tuple[str, ...]:
    names = list(load_file(model / FILE))
    (model / FILE).rename(model / "model-00001-of-00002.safetensors")
    files = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    files[names[0]] = "model-00002-of-00002.safetensors"
    (model / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return ("model-00002-of-00002.safetensors is not there",)


def _nan_factors(model: Path) -> tuple[str, ...]:
    tensors = load_file(model / FILE)
    names = [name for name in tensors if name.endswith("_scale_inv")][:2]
    for name in names:
        tensors[name][0, 0] = float("nan")
    save_file(tensors, model / FILE, {"format": "pt"})
    return ("nan at [0, 0]", *names)


def _other_family(model: Path) -> tuple[str, ...]:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    return "'gpt2'", "glm_moe_dsa", "; name a model of one of these\n"


def _no_config(model: Path) -> tuple[str, ...]:
    (model / "config.json").unlink()
    return ("config.json",)


def _pickles_alone(model: Path) -> tuple[str, ...]:
    (model / FILE).unlink()
    write_harmful_pickle(model / "pytorch_model.bin", model / "executed")
    return "neither model.safetensors nor", str(model)


def _a_tensor_less(model: Path) -> tuple[str, ...]:
    tensors = load_file(model / FILE)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.rotary.weight"] = torch.ones(3)
    save_file(tensors, model / FILE, {"format": "pt"})
    return "lack model.norm.weight", "model.layers.0.self_attn.rotary.weight"


def _another_width(model: Path) -> tuple[str, ...]:
    tensors = load_file(model / FILE)
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, model / FILE, {"format": "pt"})
    return ("model.norm.weight is [3], and in config.json hidden_size is 160",)


DAMAGES = [
    *(_cut, _lost, _nan_factors, _other_family, _no_config, _pickles_alone, _a_tensor_less, _another_width)
]


class Harmful:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def write_harmful_pickle(path: Path, makes: Path) -> None:
    torch.save(Harmful(makes), path)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_").replace("_", " "))
def test_import_refuses(model: Path, tmp_path: Path, damage: Any) -> None:
    says = damage(model)
    target = tmp_path / "target"
    refused("import", model, target, says=says, target=target)
    assert not target.exists()
    assert not (model / "executed").exists()


def import_with_a_damage_on_rank_1(model: str, target: str) -> str:
    """Import with factors that only one process finds invalid; return this rank's message."""
    wanted = job.import_of(Path(model), Path(target), [], None)
    if dist.get_rank() == 1:
        wanted.files.check_factors = lambda: (_ for _ in ()).throw(RunError("factors are nan"))
    with pytest.raises(RunError) as caught:
        importing.run(wanted, lambda total: lambda done: None)
    return str(caught.value)


def test_all_processes_hear_of_a_damage_that_one_reads(model: Path, tmp_path: Path, pool: Any) -> None:
    target = tmp_path / "target"
    function = f"{__name__}:import_with_a_damage_on_rank_1"
    assert pool.run(function, 2, timeout_s=60, model=str(model), target=str(target)) == [
        "factors are nan",
        "factors are nan",
    ]
    assert not target.exists()


def test_import_refuses_flags_of_another_model_in_one_message(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    flags = ["--num-layers", 7, "--hidden-size", 99, "--kv-lora-rank", 3, "--ckpt-format", "torch"]
    says = ("--num-layers", "--hidden-size", "--kv-lora-rank", "--ckpt-format torch is", f"--load-hf {model}")
    refused("import", model, target, "--", *flags, says=says, target=target)
    assert not target.exists()


def test_missing_packages_are_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindspeed_dsa.tools.cli.weights.find_spec", lambda name: None)
    for command in ("import", "export"):
        status, text = weights(command, tmp_path / "none", tmp_path / "target")
        assert status == 2
        assert "it needs safetensors and tqdm: pip install 'mindspeed_dsa[weights]'" in text


def test_import_keeps_what_is_there(model: Path, checkpoints: Path, tmp_path: Path) -> None:
    refused("import", model, checkpoints, says=("release exists already",), target=checkpoints)
    job = tmp_path / "job"
    (job / "iter_0000010").mkdir(parents=True)
    (job / "latest_checkpointed_iteration.txt").write_text("10")
    refused("import", model, job, says=("checkpoints of a job", "10"), target=job)


def test_import_and_export_need_a_folder_that_can_be_written(
    model: Path, checkpoints: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "target"
    refused("import", model, target, says=(str(tmp_path / "file"),), target=target)
    refused("export", checkpoints, target, says=(str(tmp_path / "file"),), target=target)


# -- export ------------------------------------------------------------------------------------


def _cut_file(checkpoints: Path) -> tuple[str, ...]:
    file = next((checkpoints / "release").glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1000)
    return file.name, "cut short"


def _lost_file(checkpoints: Path) -> tuple[str, ...]:
    file = next((checkpoints / "release").glob("*.distcp"))
    file.unlink()
    return file.name, "not there"


def _overwritten_file(checkpoints: Path) -> tuple[str, ...]:
    file = next((checkpoints / "release").glob("*.distcp"))
    file.write_bytes(b"\0" * file.stat().st_size)
    return file.name, "is damaged"


def _cut_index(checkpoints: Path) -> tuple[str, ...]:
    index = checkpoints / "release" / ".metadata"
    os.truncate(index, 1000)
    return (str(index),)


def _index_of_something_else(checkpoints: Path) -> tuple[str, ...]:
    index = checkpoints / "release" / ".metadata"
    index.write_bytes(pickle.dumps({"a": 1}))
    return (str(index),)


def _executing_index(checkpoints: Path) -> tuple[str, ...]:
    index = checkpoints / "release" / ".metadata"
    index.write_bytes(pickle.dumps(Harmful(checkpoints / "executed")))
    return str(index), "does not belong"


def _index_that_goes_through_a_module(checkpoints: Path) -> tuple[str, ...]:
    """From protocol 4 on a name may have dots, and torch's module imports ``os``."""
    index, path = checkpoints / "release" / ".metadata", str(checkpoints / "executed").encode()
    module = b"torch.distributed.checkpoint.filesystem"
    index.write_bytes(
        b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c\x08os.mkdir\x93"
        b"X" + len(path).to_bytes(4, "little") + path + b"\x85R."
    )
    return str(index), "does not belong"


def _executing_arguments(checkpoints: Path) -> tuple[str, ...]:
    torch.save({"args": Harmful(checkpoints / "executed")}, checkpoints / "release" / "common.pt")
    return ("--like",)


def _cut_arguments(checkpoints: Path) -> tuple[str, ...]:
    os.truncate(checkpoints / "release" / "common.pt", 300)
    return "arguments in", "use a checkpoint that is whole"


def _arguments_of_another_family(checkpoints: Path) -> tuple[str, ...]:
    from argparse import Namespace

    args = Namespace(num_layers=2, hidden_size=32, num_attention_heads=4)
    torch.save({"args": args}, checkpoints / "release" / "common.pt")
    return ("lack",)


def _more_layers(checkpoints: Path) -> tuple[str, ...]:
    common = torch.load(checkpoints / "release" / "common.pt", weights_only=False)
    common["args"].num_layers, common["args"].moe_layer_freq = 3, [0, 1, 1]
    torch.save(common, checkpoints / "release" / "common.pt")
    return "layer 2", "another model"


EXPORT_DAMAGES = [
    _cut_file, _lost_file, _overwritten_file, _cut_index, _index_of_something_else, _executing_index,
    _index_that_goes_through_a_module, _executing_arguments, _cut_arguments, _arguments_of_another_family,
    _more_layers,
]  # fmt: skip


@pytest.mark.parametrize(
    "damage", EXPORT_DAMAGES, ids=lambda damage: damage.__name__.strip("_").replace("_", " ")
)
def test_export_refuses(checkpoints: Path, tmp_path: Path, damage: Any) -> None:
    says = damage(checkpoints)
    target = tmp_path / "target"
    refused("export", checkpoints, target, says=says, target=target)
    assert not target.exists()
    assert not (checkpoints / "executed").exists()


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Yield models that differ from the checkpoint's."""
    folder = tmp_path_factory.mktemp("others")
    return {
        "wider": models.write("deepseek_v32", folder / "wider", hidden_size=32, num_hidden_layers=2),
        "smaller vocabulary": models.write(
            "deepseek_v32", folder / "smaller", num_hidden_layers=2, vocab_size=200
        ),
        "another family": models.write("glm_moe_dsa", folder / "family", num_hidden_layers=2),
        "fewer experts": models.write(
            "deepseek_v32", folder / "experts", num_hidden_layers=1, n_routed_experts=2
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("wider", ("hidden_size is 160 here and 32 in the files",)),
        ("smaller vocabulary", ("vocabulary of 300", "200")),
        ("another family", ("dsa_indexer_rope_interleaved is False here and True in the files",)),
        ("fewer experts", ("num_layers is 2 here and 1", "num_experts is 4 here and 2")),
    ],
)
def test_export_refuses_to_be_like_another_model(
    checkpoints: Path, tmp_path: Path, others: dict[str, Path], other: str, says: tuple[str, ...]
) -> None:
    """One message lists the differences, and names no flag, because an export takes none."""
    target = tmp_path / "target"
    text = refused("export", checkpoints, target, "--like", others[other], says=says, target=target)
    assert not {"--num-layers", "--hidden-size", "--num-experts"} & set(text.split())
    assert not target.exists()


def test_export_keeps_what_is_there(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    refused("export", checkpoints, tmp_path / "out", says=("exists already",), target=tmp_path / "out")
    refused("export", checkpoints, Path("."), says=("exists already",), target=tmp_path / "none")


def test_export_in_fp8_refuses_nan_by_the_name_of_the_weight(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An import refuses them, and a job that diverged saves them.
    monkeypatch.setattr(Reader, "require_finite", lambda files, who: None)
    tensors = load_file(model / FILE)
    name = "model.layers.1.self_attn.o_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = torch.full(tensors[name].shape, float("nan"), dtype=torch.bfloat16)
    save_file(tensors, model / FILE, {"format": "pt"})
    done("import", model, tmp_path / "checkpoints")
    target = tmp_path / "target"
    says = (name, "NaN", "export in bf16")
    status, text = weights("export", tmp_path / "checkpoints", target, "--fp8-blocks")
    assert status == 2
    assert all(each in text for each in says), text
    assert not target.exists()


def test_code_of_the_model_folder_is_neither_run_nor_copied(
    model: Path, checkpoints: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "modeling.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\n")
    write_harmful_pickle(model / "pytorch_model.bin", tmp_path / "executed")
    done("import", model, tmp_path / "again")
    done("export", checkpoints, tmp_path / "out", "--like", model)
    assert not (tmp_path / "executed").exists()
    assert not list((tmp_path / "out").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
