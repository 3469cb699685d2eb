"""Launch scripts of MindSpeed-LLM, shrunk, with ``--accept-mindspeed-flags`` and Megatron-LM itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.version import Version

from mindspeed_dsa.tools.migrate import shell
from mindspeed_dsa.tools.migrate.job import Given, split
from mindspeed_dsa.tools.migrate.translate import translate, words

LAUNCHER = Path(__file__).parents[3] / "examples" / "megatron_lm" / "run_megatron.py"
EVERYWHERE = """
--pipeline-model-parallel-size 1 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--seq-length 64 --micro-batch-size 1 --global-batch-size 4 --vocab-size 512 --padded-vocab-size 640
--tokenizer-type NullTokenizer --mock-data --train-iters 4 --lr-decay-iters 4 --lr-warmup-iters 0 --lr 1e-3
"""
DATA = "--load --save --data-path --tokenizer-name-or-path --split"
SPARSE = """--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --q-lora-rank 32 --kv-lora-rank 32
--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --num-experts 8 --moe-ffn-hidden-size 32
--moe-shared-expert-intermediate-size 32 --moe-router-topk 2 --index-n-heads 8 --index-head-dim 16
--index-topk 16 --first-k-dense-replace 1"""
FOUR_LAYERS = "--num-layers 4 --noop-layers 3"
OF_A_PIPELINE = "--num-layers-per-virtual-pipeline-stage"
FUSED = ("fused-dsa", "dsa-absorb", "swap-optimizer", "fused-rmsnorm", "fused-swiglu")
KERNELS = "--use-dsa-absorb --use-fused-sparse-flash-attention --use-fused-lightning-indexer-kl-loss"
"""Which the translation gives by these names; without them Megatron's own functions attend, head by head."""
SCRIPTS = {
    "deepseek32/pretrain_deepseek32_671b_4k_A3_ptd.sh": (
        f"{SPARSE} {FOUR_LAYERS} --moe-router-num-groups 2 --moe-router-group-topk 1",
        OF_A_PIPELINE,
        FUSED,
    ),
    "glm5/pretrain_glm5_744b_4k_A3_ptd.sh": (f"{SPARSE} {FOUR_LAYERS}", OF_A_PIPELINE, FUSED),
    "glm52/pretrain_glm52_744b_4k_A3_ptd.sh": (
        f"{SPARSE} --num-layers 5 --num-layer-list 5 --kv-channels 8",
        OF_A_PIPELINE,
        (*FUSED, "dsa-shared-selections"),
    ),
    "deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh": (
        """--tensor-model-parallel-size 1 --expert-model-parallel-size 2 --num-layers 4 --noop-layers 3
        --first-k-dense-replace 1 --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8
        --v-head-dim 16 --num-experts 8 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
        --moe-router-topk 2 --moe-router-num-groups 2 --moe-router-group-topk 1""",
        (
            "--recompute-granularity --recompute-method --recompute-num-layers --reset-attention-mask "
            "--sequence-parallel"
        ),
        ("swap-optimizer", "moe-fb-overlap", "fused-rmsnorm", "fused-swiglu"),
    ),
    "qwen25/pretrain_qwen25_72b_4k_pack.sh": (
        """--tensor-model-parallel-size 2 --num-layers 2 --num-query-groups 2 --max-position-embeddings 64""",
        "--num-layers-per-virtual-pipeline-stage",
        ("reuse-fp32-param", "recompute-activation-function", "swap-attention", "ascend-coc"),
    ),
}


def train(words: list[str]) -> tuple[str, list[float]]:
    """What two ranks print, and the loss of each step."""
    checkout = Path(os.environ["MEGATRON_LM"])
    paths = [str(LAUNCHER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(LAUNCHER), str(checkout / "pretrain_gpt.py"), *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=checkout,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout + done.stderr
    return printed, [float(loss) for loss in re.findall(r"lm loss: (\S+)", printed)]


def shrunk(script: str, weights: str = "") -> list[Given]:
    """A script's flags with small sizes, two ranks and mock data; ``weights`` are flags of its own folder."""
    sizes, without, _ = SCRIPTS[script]
    path = Path(os.environ["MINDSPEED_LLM"]) / "examples" / "mcore" / script
    _, old = split(shell.read(path.read_text(encoding="utf-8")).words)
    _, new = split(f"{EVERYWHERE} {sizes} {weights}".split())
    replaced = {given.flag for given in new} | {*DATA.split(), *without.split()}
    kept = (given for given in old if given.flag not in replaced)
    return [*map(without_unset, kept), *new]


def without_unset(given: Given) -> Given:
    """Leave out variables that a script has not set, as a shell does."""
    return Given(given.flag, tuple(value for value in given.values if not value.startswith("$")))


def release() -> Version:
    """Return the release of the checkout, for which ``--accept-mindspeed-flags`` translates."""
    text = (Path(os.environ["MEGATRON_LM"]) / "megatron" / "core" / "package_info.py").read_text()
    return Version(".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)))


def stock(flags: Sequence[Given]) -> list[str]:
    """The command line of the same job without what this library adds to speed or memory."""
    found = translate(flags, release())
    ours = {each.given.flag for each in found.of("same")} | {*KERNELS.split()}
    fusions = ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion"]
    return [*words([given for given in found.flags if given.flag not in ours]), *fusions]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not {"MEGATRON_LM", "MINDSPEED_LLM"} <= set(os.environ),
    reason="MEGATRON_LM, MINDSPEED_LLM name no checkouts",
)
@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_shrunk_script_trains_as_stock_megatron_does(script: str) -> None:
    flags, (*_, features) = shrunk(script), SCRIPTS[script]
    printed, losses = train(["--accept-mindspeed-flags", *words(flags)])
    assert "not needed here: " in printed
    for feature in features:
        assert re.search(rf"^{feature} .*applied", printed, re.MULTILINE), feature
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.05

    printed, others = train(stock(flags))
    alone = set(features) - {"dsa-shared-selections"}  # the model's own
    assert not re.search(rf"^({'|'.join(alone)}) .*applied", printed, re.MULTILINE)
    assert losses == pytest.approx(others, rel=1e-3)
