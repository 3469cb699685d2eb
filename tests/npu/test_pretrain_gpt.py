"""Megatron-LM's own pretrain_gpt.py, unedited, on NPU tensors; ``MEGATRON_LM`` names checkouts.

Each layout trains, evaluates, saves, and resumes in new processes. Losses equal the CPU platform's in an
uninterrupted run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from mindspeed_dsa.patches import versions
from mindspeed_dsa.runs import metrics
from tests.matrix.hugging_face import DEEPSEEK, Model
from tests.npu import pretrain_gpt
from tests.npu.device import launch

TRAINING = """
    --mock-data --tokenizer-type NullTokenizer --seq-length 32 --micro-batch-size 1 --bf16
    --transformer-impl local --use-fused-dsa --fused-operators all --moe-token-dispatcher-type alltoall
    --lr 1e-3 --lr-decay-iters 10 --lr-warmup-iters 0 --split 80,10,10 --eval-iters 1 --eval-interval 2
    --log-interval 1 --distributed-timeout-minutes 5
"""
MODEL = f"""
    {TRAINING} --vocab-size 4351 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96
    --max-position-embeddings 32 --no-persist-layer-norm --no-rope-fusion --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --multi-latent-attention --experimental-attention-variant dsa --q-lora-rank 32 --kv-lora-rank 512
    --qk-head-dim 16 --qk-pos-emb-head-dim 64 --v-head-dim 16 --dsa-indexer-n-heads 8
    --dsa-indexer-head-dim 128 --dsa-indexer-topk 32 --dsa-indexer-loss-coeff 0.01
    --dsa-indexer-use-sparse-loss --untie-embeddings-and-output-weights
    --use-dsa-absorb on
"""
EXPERTS = """
    --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2
    --moe-grouped-gemm --moe-permute-fusion
"""
PP2 = "--pipeline-model-parallel-size 2"
PAIRS = f"{EXPERTS} --expert-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --moe-fb-overlap"
LAYOUTS = {
    "TP2+SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": PP2,
    "PP2 x VPP2 in pairs": f"{PP2} --num-layers 4 {PAIRS}",
    "CP2": "--context-parallel-size 2",
    "EP2": f"{EXPERTS} --expert-model-parallel-size 2",
    "DP2, sharded optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "asynchronous saves": "--async-save --use-persistent-ckpt-worker --ckpt-format torch_dist",
    "FSDP2": "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist",
}
RANKS = {"PP2 x VPP2 in pairs": 4}
"""Number of ranks of layouts that need more than two."""
SINCE = {"PP2 x VPP2 in pairs": "0.14", "FSDP2": "0.16", "asynchronous saves": "0.13"}
"""First releases of layouts that older releases lack; 0.12 writes no torch_dist with today's torch."""
SHORT = ("TP2+SP",)
"""Layouts of the quick tests."""
STEPS = 4
EVALUATION = re.compile(r"validation loss at iteration (\d+) [^|]*\|[^|]*lm loss value: (\S+)")
BOUND = 2e-3  # two orders of sums in bf16


def checkouts() -> dict[str, str]:
    """Return folders of checkouts by release."""
    folders = {}
    for folder in filter(None, os.environ.get("MEGATRON_LM", "").split(os.pathsep)):
        info = Path(folder, "megatron", "core", "package_info.py")
        folders[str(versions.version_in_source(info.read_text(encoding="utf-8")))] = folder
    return folders


def served() -> list[str]:
    """Return releases of the checkouts that this Python can run."""
    # 0.19's scripts import it.
    return [each for each in checkouts() if Version(each) < Version("0.19") or hasattr(typing, "override")]


def rows() -> list[object]:
    """Return one parameter row for each release and layout."""
    if not checkouts():
        return [pytest.param("", "", marks=pytest.mark.skip(reason="MEGATRON_LM names no checkout"))]
    return [
        pytest.param(release, name, marks=[] if name in SHORT and n == 0 else [pytest.mark.full])
        for n, release in enumerate(served())
        for name in LAYOUTS
        if Version(release) >= Version(SINCE.get(name, "0"))
    ]


def train(folder: Path, platform: str, release: str, flags: Sequence[str], ranks: int = 2, note: str = ""):
    """Train on all ranks of a layout.

    Args:
        folder: folder for the metrics.
        platform: ``npu`` or ``cpu``.
        release: release of the checkout.
        flags: flags of the model, the layout and the job.
        ranks: number of processes.
        note: suffix that tells the metrics of two jobs apart.

    Returns:
        Records by step, losses of evaluations by step, and the output.
    """
    metrics_file = folder / f"{platform}{note}.jsonl"
    job_flags = [*flags, "--mindspeed-platform", platform, "--global-batch-size", "4"]
    job_flags += ["--train-iters", str(STEPS), "--step-metrics-file", str(metrics_file)]
    if platform == "cpu":
        job_flags += ["--distributed-backend", "gloo", "--no-gradient-accumulation-fusion"]
    if Version(release) < Version("0.13"):  # its other format does not write with today's torch
        job_flags += ["--ckpt-format", "torch"]
    # The checkout builds its data helpers with the python3 and python3-config on the path.
    programs = [os.path.dirname(sys.executable), os.path.join(sys.base_prefix, "bin"), os.environ["PATH"]]
    variables = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8" if "--use-torch-fsdp2" in job_flags else "1",
        "PATH": os.pathsep.join(programs),
    }
    done = launch.run(
        Path(pretrain_gpt.__file__),
        [checkouts()[release], *job_flags],
        ranks=ranks,
        variables=variables,
        stand_in=platform == "npu",
    )
    done.require_success()
    told = "".join(done.output)
    evaluated = {int(step): float(loss) for step, loss in EVALUATION.findall(told)}
    return metrics.read(metrics_file), evaluated, told


def require_equal(steps: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> None:
    """Compare losses and norms of the first steps."""
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for got, wanted in zip(steps, expected, strict=True):
        assert got["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=BOUND)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=2e-2)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("release", "name"), rows())
def test_a_layout_trains_saves_and_resumes(release: str, name: str, tmp_path: Path) -> None:
    flags = [*MODEL.split(), *LAYOUTS[name].split()]
    if "--num-layers" not in flags:
        flags += ["--num-layers", "2"]
    ranks, saved = RANKS.get(name, 2), str(tmp_path / "saved")
    until = ["--exit-interval", "2", "--save", saved, "--save-interval", "2"]
    expected, validated, _ = train(tmp_path, "cpu", release, flags, ranks)
    first, evaluated, _ = train(tmp_path, "npu", release, [*flags, *until], ranks, "-first")
    second, _, _ = train(tmp_path, "npu", release, [*flags, "--load", saved], ranks, "-second")
    require_equal([*first, *second], expected)
    assert evaluated[2] == pytest.approx(validated[2], rel=BOUND)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("release", served() or [""])
def test_files_of_a_job(release: str, tmp_path: Path) -> None:
    """A job reads Hugging Face's files, and writes them, checkpoints and reports on the device."""
    if not release:
        pytest.skip("MEGATRON_LM names no checkout")
    if Version(release) < Version("0.13"):
        pytest.skip("--save-hf needs torch_dist, which this release does not write with today's torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    # Larger than all mock tokens, and a multiple of 128 for each of two ranks.
    theirs = Model(DEEPSEEK, 2).theirs(vocab_size=4352, num_nextn_predict_layers=0)
    theirs.save_pretrained(tmp_path / "model")
    model_flags = weights_flags(tmp_path / "model")
    model_flags[model_flags.index("--vocab-size") + 1] = (
        "4351"  # the tokenizer has one more, the end of a document
    )
    flags = [
        *model_flags,
        *TRAINING.split(),
        "--expert-model-parallel-size",
        "2",
        "--load-hf",
        str(tmp_path / "model"),
    ]

    saved, written, load = (tmp_path / each for each in ("saved", "written", "load"))
    keeping = f"--save {saved} --save-interval 2 --whole-checkpoints --moe-router-load-report {load}".split()
    digests = [f"--initial-weights-dir={tmp_path / each}" for each in ("cpu", "npu")]
    expected, _, _ = train(tmp_path, "cpu", release, [*flags, digests[0]])
    until = [*keeping, digests[1], "--exit-interval", "2"]
    first, _, _ = train(tmp_path, "npu", release, [*flags, *until], note="-first")
    going_on = [*keeping, "--load", str(saved), "--moe-expert-placement", "auto", "--save-hf", str(written)]
    second, _, told = train(tmp_path, "npu", release, [*flags, *going_on], note="-second")
    require_equal([*first, *second], expected)
    assert "--load-hf is not read" in told
    for digest in (tmp_path / "cpu").iterdir():
        assert digest.read_text() == (tmp_path / "npu" / digest.name).read_text()
    assert [json.loads(line)["step"] for line in (load / "expert_load.jsonl").open()] == [1, 2, 3, 4]
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(
        written / "iter_0000004", output_loading_info=True
    )
    assert not any(loading.values()), loading


def weights_flags(model: Path) -> list[str]:
    """Return the flags that ``python -m mindspeed_dsa weights flags`` prints for a model."""
    command = [sys.executable, "-m", "mindspeed_dsa", "weights", "flags", str(model)]
    return shlex.split(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
