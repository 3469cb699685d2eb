"""Jobs of TorchTitan's training program on CPU ranks, and their records."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support import warm
from tests.support.ports import free_port
from tests.support.third_party import OF_TORCHTITAN

ROOT = Path(__file__).parents[3]
OLD = Path(sys.prefix) / "torchtitan-0.2"
"""Folder with the packages of TorchTitan 0.2; the environment has 0.3. `make test-hosts` fills it."""
BACKEND = ("--parallelism.spmd_backend", "partial_dtensor")
"""The only one of TorchTitan 0.3's three ways to hold parameters that PyTorch before 2.14 supports."""


PROGRAM = "tests.hosts.torchtitan.on_cpu"
PAGE = ("npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm", "npu_rope")
"""Converters of the page's configuration."""


class Record(NamedTuple):
    """Record of a job."""

    steps: list[tuple[int, float, float]]
    """Step, loss and gradient norm, from the rank that has the loss."""
    calls: dict[str, int]
    """Calls of the operators' functions, by all ranks."""
    indexer_losses: list[float]
    """Indexer losses of all layers on all ranks, in the last step."""
    initial: dict[str, float]
    """Sums of squares of the weights before the first step."""
    weights: dict[str, float]
    """Sums of squares of the weights after the last step."""
    moved: dict[str, int]
    """Bytes of keys and of their gradients that a rank has got from other ranks, by kind of transfer."""
    gradients: dict[str, Tensor]
    """Gradients of the first step, whole, before they are clipped."""
    parts: list[dict[str, Any]]
    """Record of each rank, see ``on_cpu.record``."""
    log: str


def quick_on_two(layouts: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """Return the names of layouts as parameters; tests on more than two ranks are long ones.

    Args:
        layouts: dict from name to a tuple that begins with the number of ranks.
    """
    return [
        pytest.param(name, marks=pytest.mark.full) if ranks > 2 else name
        for name, (ranks, *_) in layouts.items()
    ]


def files(folder: Path) -> Path:
    """Write a tokenizer and text into a folder; return the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = (ROOT / "LICENSE").read_text()  # a text that does not change
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<bos>", "<eos>"]
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    )
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    pieces = [text[at : at + 400] for at in range(0, len(text), 400)]
    short = [text[at : at + 60] for at in range(0, len(text), 60)]
    for name, texts in (("corpus", pieces), ("same", [text[:4000]] * 8), ("short", short)):
        (folder / name).mkdir()
        lines = "".join(json.dumps({"text": each}) + "\n" for each in texts)
        (folder / name / "data.json").write_text(lines)
    return folder


def start(
    folder: Path, ranks: int, arguments: list[str], *, module: str = PROGRAM, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the program with TorchTitan's arguments in a folder; return the completed job.

    The ranks begin with torch and TorchTitan's dependencies imported, and with the variables of torchrun that
    TorchTitan reads. When a rank fails, the others are killed.

    Raises:
        subprocess.TimeoutExpired: the job took more than 1500 s; it has the output.
    """
    command = [sys.executable, "-m", module, *arguments]
    path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment, "PYTHONPATH": path}
    settings |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    settings |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    running: dict[int, warm.Process] = {}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:

        def printed() -> list[str]:
            for file in (out, err):
                file.seek(0)
            return [out.read(), err.read()]

        code, deadline = 0, time.monotonic() + 1500
        try:
            for rank in range(ranks):
                own = {**os.environ, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = warm.popen(
                    command, cwd=folder, env=own, stdout=out, stderr=err, imported=OF_TORCHTITAN
                )
                running[os.pidfd_open(process.pid)] = process
            while running and not code:
                ended, _, _ = select.select(running, [], [], max(0.0, deadline - time.monotonic()))
                if not ended:
                    raise subprocess.TimeoutExpired(command, 1500, *printed())
                for descriptor in ended:
                    code = code or running[descriptor].wait()
                    del running[descriptor]
                    os.close(descriptor)
        finally:
            for descriptor, process in running.items():
                process.kill()
                process.wait()
                os.close(descriptor)
        return subprocess.CompletedProcess(command, code, *printed())


def train(folder: Path, ranks: int, arguments: list[str], **environment: str) -> Record:
    """Run the program; return its record, or fail with its output."""
    records = folder / "records"
    records.mkdir(exist_ok=True)
    for old in records.iterdir():
        old.unlink()
    done = start(folder, ranks, arguments, TITAN_RECORD=str(records), **environment)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    parts: list[dict[str, Any]] = [
        json.loads((records / f"{rank}.json").read_text()) for rank in range(ranks)
    ]
    calls: dict[str, int] = {}
    for part in parts:
        for name, count in part["calls"].items():
            calls[name] = calls.get(name, 0) + count
    gradients: dict[str, Tensor] = {}
    for rank in range(ranks):
        gradients |= {plain(name): x for name, x in torch.load(records / f"{rank}.pt").items()}
    losses = [loss for part in parts for each in part["indexer_losses"] for loss in each.values()]
    initial, weights = (
        {plain(name): value for part in parts for name, value in part[when].items()}
        for when in ("initial", "weights")
    )
    steps = [tuple(step) for step in parts[-1]["steps"]]
    return Record(steps, calls, losses, initial, weights, parts[0]["moved"], gradients, parts, output)


def assert_one_process(ours: Record, one: Record) -> None:
    """Assert that a job on context parallel ranks has the losses and gradients of one process."""
    assert len(one.steps) == 2
    assert not one.moved
    assert ours.moved["keys"] > 0
    assert ours.steps == [pytest.approx(step, rel=1e-5) for step in one.steps]
    assert ours.gradients.keys() == one.gradients.keys()
    for name, gradient in one.gradients.items():
        error = (ours.gradients[name] - gradient).abs().max() / gradient.abs().max()
        # An indexer's gradient is a difference of two distributions, which are nearly equal here.
        assert error < (5e-5 if ".indexer." in name else 1e-5), f"{name}: {error}"


def checkpoint(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's content; the names of nested entries have dots."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, file)

    def entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, each in value.items():
                yield from entries(f"{name}.{key}", each)
        else:
            yield name, value

    return dict(entries("", torch.load(file, weights_only=False)))


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Assert that two checkpoints have the same tensors, bit for bit, and the same numbers."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype is value.dtype, name
            assert ours[name].equal(value), name
        elif isinstance(value, (int, float, str)):
            assert ours[name] == value, name


def plain(name: str) -> str:
    """Return a parameter's name without the recomputation wrapper's prefix."""
    return name.replace("_checkpoint_wrapped_module.", "")


def by_config(
    folder: Path,
    ranks: int = 1,
    *arguments: str,
    converters: dict[str, Any] | None = None,
    **environment: str,
) -> Record:
    """Run TorchTitan 0.3, stock or with converters and their options."""
    name = "tiny" if converters is None else "converted"
    job_arguments = ["--module", "tests.hosts.torchtitan", "--config", name, "--debug.seed", "7", *arguments]
    if ranks > 1:
        job_arguments += BACKEND
    return train(folder, ranks, job_arguments, TITAN_CONVERTERS=json.dumps(converters), **environment)


def toml(converters: list[str], dsa: dict[str, Any]) -> str:
    """Return a configuration for TorchTitan 0.2, from docs/hosts/torchtitan.md."""
    page = (ROOT / "docs" / "hosts" / "torchtitan.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    names = f"converters = {json.dumps(PAGE)}"
    section = "".join(f"{key} = {json.dumps(value)}\n" for key, value in dsa.items())
    head, _, rest = text.replace(names, f"converters = {json.dumps(converters)}").partition("\n[dsa]\n")
    assert rest, "the page's configuration has a section [dsa]"
    return f"{head}\n[dsa]\n{section}\n{rest[rest.index('[') :]}"


def by_model(folder: Path, ranks: int = 1, *arguments: str, converters: list[str], **dsa: Any) -> Record:
    """Run TorchTitan 0.2 with converters and the options of sparse attention."""
    (folder / "job.toml").write_text(toml(converters, dsa))
    given = ["--job.config_file", "job.toml", "--optimizer.eps", "1e-3", *arguments]
    return train(folder, ranks, given, PYTHONPATH=str(OLD))
