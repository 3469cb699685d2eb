"""Jobs of Megatron-LM's pretrain_gpt.py that start from transformers' files and write such files.

``MEGATRON_LM`` names checkouts, as for ``test_pretrain_gpt.py``. The first loss equals transformers' loss on
the same tokens, and transformers loads the models that the job writes.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from mindspeed_dsa.patches import versions
from mindspeed_dsa.runs import metrics
from tests.matrix.hugging_face import DEEPSEEK, DENSE, GLM, Model, loss_of_transformers
from tests.matrix.record import Note
from tests.matrix.test_pretrain_gpt import checkout, reported
from tests.tools.weights import families

transformers = pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20")
pytestmark = [
    pytest.mark.releases(">=0.12.1", quick=True),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release"),
]

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "examples" / "megatron_lm" / "run_megatron.py"
VOCABULARY = 4352
"""A multiple of 128 on each of two ranks, so that no row is padding. Mock data have fewer tokens."""
CHECKPOINTS = Version(str(versions.of_megatron())) >= Version("0.13")
"""Whether the release writes torch_dist here. Older ones use functions that torch 2.13 and numpy 2 removed,
and need the version of Transformer Engine to load.
"""
LENGTH, BATCH = 32, 4
TRAINING = f"""
--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --mock-data
--tokenizer-type NullTokenizer --seq-length {LENGTH} --micro-batch-size 1 --global-batch-size {BATCH}
--train-iters 5 --lr 1e-3 --lr-decay-iters 50 --log-interval 1 --eval-interval 100 --eval-iters 1
--distributed-timeout-minutes 5 --moe-token-dispatcher-type alltoall
""".split()
BF16 = "--bf16 --use-distributed-optimizer"
"""bf16 training; gradients are accumulated in fp32."""
CASES = {
    "TP2+SP": (DENSE, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "EP2": (DEEPSEEK, "--expert-model-parallel-size 2 --use-fused-dsa"),
    "PP2": (GLM, "--pipeline-model-parallel-size 2 --use-fused-dsa"),
    "EP2, bf16": (DENSE, f"--expert-model-parallel-size 2 {BF16}"),
    "TP2+SP, norms of heads": ("qwen3_moe", "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2, tied": ("qwen2", "--pipeline-model-parallel-size 2"),
    "EP2, softmax, grouped": ("mixtral", "--expert-model-parallel-size 2 --moe-grouped-gemm"),
    "TP2+SP, scaled rotary embeddings": ("llama", "--tensor-model-parallel-size 2 --sequence-parallel"),
    "EP2, gated shared expert": ("qwen2_moe", "--expert-model-parallel-size 2"),
}


def folder_of(kind: str, folder: Path) -> Path:
    """Write a model with random weights with transformers."""
    if kind in families.MODELS:
        families.write(kind, folder, vocab_size=VOCABULARY)
        return folder
    torch.manual_seed(0)
    model = Model(kind, 4, *((2, 1) if kind == GLM else ())).theirs(
        vocab_size=VOCABULARY, num_nextn_predict_layers=0
    )
    model.save_pretrained(folder)
    return folder


def weights(*words: str) -> str:
    """Run ``python -m mindspeed_dsa weights``."""
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_dsa", "weights", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def flags_of(model: Path, *layout: str) -> list[str]:
    """Return the flags of a model, of its layout, and of every job here."""
    model_flags = shlex.split(weights("flags", str(model)))
    # The tokenizer adds one token, the end of a document.
    model_flags[model_flags.index("--vocab-size") + 1] = str(VOCABULARY - 1)
    return [*model_flags, *TRAINING, *layout]


def job(
    folder: Path, flags: Sequence[str], *more: str, batches: Path | None = None
) -> tuple[str, list[float]]:
    """Train on two ranks in a new folder; return the output, and the loss of each step.

    Megatron's own log has means: its first line after a start is averaged into the next line as well.
    """
    where = checkout()
    folder.mkdir()
    programs = [os.path.dirname(sys.executable), os.path.join(sys.base_prefix, "bin"), os.environ["PATH"]]
    environment = {
        **os.environ,
        "MEGATRON_LM": str(where),
        "BATCHES": str(batches),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8" if "--use-torch-fsdp2" in flags else "1",
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": os.pathsep.join([str(where), str(ROOT), *sys.path]),
    }
    script = (
        f"{where}/pretrain_gpt.py" if batches is None else str(ROOT / "tests/matrix/recorded_pretrain.py")
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    written = ["--step-metrics-file", str(folder / "steps.jsonl"), "--mindspeed-report-dir", str(folder)]
    done = subprocess.run(
        [*command, str(LAUNCHER), script, *flags, *written, *more],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-6000:]
    return printed, [record["lm_loss"] for record in metrics.read(folder / "steps.jsonl")]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a model's files."""
    from safetensors.torch import load_file

    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def loads_strictly(folder: Path) -> Any:
    """Load a model with transformers; no name may be missing or unexpected."""
    model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    return model.config


IN_MATRIX = ("TP2+SP",)


@pytest.mark.parametrize(
    "case",
    [
        name
        if "MATRIX_RECORD" in os.environ and name in IN_MATRIX
        else pytest.param(name, marks=pytest.mark.full)
        for name in CASES
    ],
)
def test_a_job_begins_with_files_and_ends_with_them(note: Note, tmp_path: Path, case: str) -> None:
    note.begins(f"pretrain_gpt.py, {case}", "load-hf", *(["save-hf"] if CHECKPOINTS else []))
    kind, layout = CASES[case]
    model = folder_of(kind, tmp_path / "model")
    flags = flags_of(model, *layout.split())
    saved, batches = tmp_path / "own", tmp_path / "batches"
    batches.mkdir()
    saving = ["--save", str(saved), "--save-interval", "2", "--load", str(saved)]
    begins = ["--load-hf", str(model)]
    if CHECKPOINTS:
        begins += [*saving, "--save-hf", str(tmp_path / "hf"), "--save-hf-interval", "2"]
    printed, losses = job(tmp_path / "first", flags, *begins, "--exit-interval", "3", batches=batches)
    assert len(losses) == 3
    assert f"{model}: " in printed
    expected = loss_of_transformers(model, batches, BATCH)
    assert losses[0] == pytest.approx(expected, rel=1e-2 if "bf16" in case else 2e-6)

    # Without files the loss differs; from an imported checkpoint it is the same.
    _, drawn = job(tmp_path / "drawn", flags, "--exit-interval", "1")
    assert abs(drawn[0] - losses[0]) > 1e-4
    note.trained([{"at work": reported(tmp_path / "first")}])
    if not CHECKPOINTS:
        return
    imported = tmp_path / "imported"
    weights("import", str(model), str(imported), "--", *flags)
    _, others = job(tmp_path / "second", flags, "--load", str(imported), "--exit-interval", "3")
    assert others == losses

    # A second start resumes from step 3.
    printed, resumed = job(tmp_path / "resumed", flags, *begins)
    assert "--load-hf is not read" in printed
    _, whole = job(tmp_path / "whole", flags, "--load-hf", str(model))
    assert [*losses, *resumed] == whole

    # The exit after step 3 is not the end of the job; the last files equal the checkpoint.
    assert {path.name for path in (tmp_path / "hf").iterdir() if path.is_dir()} == {
        "iter_0000002",
        "iter_0000004",
        "iter_0000005",
    }
    last = tmp_path / "hf" / "iter_0000005"
    config = loads_strictly(last)
    assert config.model_type == loads_strictly(model).model_type
    weights("export", str(saved), str(tmp_path / "exported"), "--like", str(model))
    written, exported = tensors(last), tensors(tmp_path / "exported")
    assert written.keys() == exported.keys() == tensors(model).keys()
    assert all(torch.equal(each, exported[name]) for name, each in written.items())
    moved = tensors(model)
    assert any(not torch.equal(each, moved[name].to(each.dtype)) for name, each in written.items())


STORED_OTHERWISE: dict[str, tuple[str, dict[str, bool], str]] = {
    "FSDP2": ("fsdp2", {"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
    "EP2, grouped": (
        "moe-grouped-gemm",
        {"moe_grouped_gemm": True},
        "--expert-model-parallel-size 2 --moe-grouped-gemm",
    ),
    "TP2+SP, experts cut": (
        "load-hf",
        {},
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
    ),
}
"""Layouts in which ranks store weights in another form: the active feature, its switches, and flags."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Return a model's files, and the first loss of a two-rank job that starts from them."""
    folder = tmp_path_factory.mktemp("plain")
    model = folder_of(DEEPSEEK, folder / "model")
    (folder / "batches").mkdir()
    begins = ["--use-fused-dsa", "--load-hf", str(model), "--exit-interval", "1"]
    _, (loss,) = job(folder / "job", flags_of(model), *begins, batches=folder / "batches")
    assert loss == pytest.approx(loss_of_transformers(model, folder / "batches", BATCH), rel=2e-6)
    return model, loss


@pytest.mark.full
@pytest.mark.parametrize("case", STORED_OTHERWISE)
def test_weights_that_ranks_hold_otherwise(
    note: Note, plain: tuple[Path, float], tmp_path: Path, case: str
) -> None:
    feature, switches, layout = STORED_OTHERWISE[case]
    if note.begins(f"pretrain_gpt.py, {case}", feature, switches=switches):
        return
    model, expected = plain
    begins = ["--use-fused-dsa", "--load-hf", str(model), "--exit-interval", "2"]
    _, losses = job(tmp_path / "job", flags_of(model, *layout.split()), *begins)
    assert losses[0] == pytest.approx(expected, rel=2e-6)
    assert losses[1] != losses[0]
    at_work = reported(tmp_path / "job")
    assert "load-hf" in at_work
    note.trained([{"at work": at_work}])


SPARSE = """
--experimental-attention-variant dsa --dsa-model deepseek-v3.2 --dsa-indexer-n-heads 32
--dsa-indexer-head-dim 16 --dsa-indexer-topk 6 --tensor-model-parallel-size 2 --sequence-parallel
--save-interval 2
""".split()
"""Flags of the page docs/weights.md, with small sizes."""


@pytest.mark.full
@pytest.mark.skipif(not CHECKPOINTS, reason="this release writes no torch_dist here")
def test_a_dense_model_becomes_a_sparse_one(tmp_path: Path) -> None:
    """Covers the warmup and the sparse stage, each interrupted, as on the page."""
    model = folder_of(DENSE, tmp_path / "model")
    flags = flags_of(model, *SPARSE)
    warm, sparse, written = tmp_path / "warm", tmp_path / "sparse", tmp_path / "written"
    first = ["--load-hf", str(model), "--dsa-stage", "warmup", "--dsa-indexer-loss-coeff", "1.0"]
    first += ["--train-iters", "4", "--save", str(warm), "--load", str(warm)]
    printed, begun = job(tmp_path / "first", flags, *first, "--exit-interval", "2")
    assert f"{model} has no indexers: those of 4 layers are initialised" in printed
    printed, went_on = job(tmp_path / "second", flags, *first)
    assert "--load-hf is not read" in printed
    assert (len(begun), len(went_on)) == (2, 2)

    weights("export", str(warm), str(tmp_path / "warmed"), "--dtype", "float32")
    before, after = tensors(model), tensors(tmp_path / "warmed")
    # The job's tokenizer has one token fewer than the embedding has rows.
    rows = {name: tensor[: after[name].size(0)] for name, tensor in before.items()}
    assert all(torch.equal(tensor, after[name]) for name, tensor in rows.items()), "all else is frozen"

    then = ["--use-fused-dsa", "--dsa-indexer-loss-coeff", "0.01", "--dsa-indexer-use-sparse-loss"]
    then += ["--override-opt-param-scheduler", "--lr", "1e-4", "--train-iters", "8", "--save", str(sparse)]
    printed, _ = job(tmp_path / "third", flags, *then, "--load", str(warm), "--exit-interval", "6")
    assert "the optimizer begins anew" in printed
    _, resumed = job(tmp_path / "fourth", flags, *then, "--load", str(sparse))
    _, whole = job(tmp_path / "whole", flags, *then[:-1], str(tmp_path / "other"), "--load", str(warm))
    assert resumed == whole[2:]

    weights("export", str(sparse), str(written))
    assert loads_strictly(written).model_type == "deepseek_v32"
