"""Megatron-LM's own pretrain_gpt.py, untouched, on NPU tensors; ``MEGATRON_LM`` names checkouts.

Each layout trains, evaluates, saves, and goes on in new processes; losses are those of the CPU platform,
which trains without a break.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from mindspeed_dsa.patches import versions
from mindspeed_dsa.runs import metrics
from tests.npu import pretrain_gpt
from tests.npu.device import launch

MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 4351
    --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --bf16
    --transformer-impl local --no-persist-layer-norm --no-rope-fusion --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --multi-latent-attention --experimental-attention-variant dsa --q-lora-rank 32 --kv-lora-rank 512
    --qk-head-dim 16 --qk-pos-emb-head-dim 64 --v-head-dim 16 --dsa-indexer-n-heads 8
    --dsa-indexer-head-dim 128 --dsa-indexer-topk 32 --dsa-indexer-loss-coeff 0.01
    --dsa-indexer-use-sparse-loss --untie-embeddings-and-output-weights
    --use-fused-dsa --use-dsa-absorb on --fused-operators all
    --lr 1e-3 --lr-decay-iters 10 --lr-warmup-iters 0 --split 80,10,10 --eval-iters 1 --eval-interval 2
    --log-interval 1 --distributed-timeout-minutes 5
"""
EXPERTS = """
    --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
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
    "FSDP2": "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist",
}
RANKS = {"PP2 x VPP2 in pairs": 4}
"""Those of layouts that two ranks are not enough for."""
SHORT = ("TP2+SP",)
"""Layouts of the quick tests."""
STEPS = 4
EVALUATION = re.compile(r"validation loss at iteration (\d+) [^|]*\|[^|]*lm loss value: (\S+)")
BOUND = 2e-3  # two orders of sums in bf16


def checkouts() -> dict[str, str]:
    """Folders by release."""
    found = {}
    for folder in filter(None, os.environ.get("MEGATRON_LM", "").split(os.pathsep)):
        info = Path(folder, "megatron", "core", "package_info.py")
        found[str(versions.version_in_source(info.read_text(encoding="utf-8")))] = folder
    return found


def rows() -> list[object]:
    """One row for each release and layout."""
    found = checkouts()
    if not found:
        return [pytest.param("", "", marks=pytest.mark.skip(reason="MEGATRON_LM names no checkout"))]
    # 0.19's scripts import names of Python 3.12: `make test-npu PYTHON=python3.12 NPU_VENV=DIR`.
    served = [each for each in found if Version(each) < Version("0.19") or sys.version_info >= (3, 12)]
    return [
        pytest.param(release, name, marks=[] if name in SHORT and n == 0 else [pytest.mark.full])
        for n, release in enumerate(served)
        for name in LAYOUTS
    ]


def train(folder: Path, platform: str, release: str, name: str, *more: str):
    """Losses by step and of evaluations."""
    flags = [*MODEL.split(), *LAYOUTS[name].split(), *more, "--mindspeed-platform", platform]
    if platform == "cpu":
        flags += ["--distributed-backend", "gloo", "--no-gradient-accumulation-fusion"]
    if "--num-layers" not in flags:
        flags += ["--num-layers", "2"]
    if Version(release) < Version("0.13"):  # its other format does not write with today's torch
        flags += ["--ckpt-format", "torch"]
    metrics_file = folder / f"{platform}-{len(more)}.jsonl"
    flags += ["--global-batch-size", "4", "--train-iters", str(STEPS)]
    flags += ["--step-metrics-file", str(metrics_file)]
    script = Path(pretrain_gpt.__file__)
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "8" if "--use-torch-fsdp2" in flags else "1"}
    arguments = [checkouts()[release], *flags]
    on_npu, ranks = platform == "npu", RANKS.get(name, 2)
    done = launch.run(script, arguments, ranks=ranks, variables=variables, stand_in=on_npu)
    done.require_success()
    told = "".join(done.output)
    return metrics.read(metrics_file), {int(step): float(loss) for step, loss in EVALUATION.findall(told)}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("release", "name"), rows())
def test_a_layout_trains_saves_and_resumes(release: str, name: str, tmp_path: Path) -> None:
    expected, validated = train(tmp_path, "cpu", release, name)
    saved = str(tmp_path / "saved")
    until = ["--exit-interval", "2", "--save", saved, "--save-interval", "2"]
    first, evaluated = train(tmp_path, "npu", release, name, *until)
    second, _ = train(tmp_path, "npu", release, name, "--load", saved)
    steps = [*first, *second]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for got, wanted in zip(steps, expected, strict=True):
        assert got["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=BOUND)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=2e-2)
    assert evaluated[2] == pytest.approx(validated[2], rel=BOUND)
