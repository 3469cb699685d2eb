"""Two launch scripts of MindSpeed-LLM, shrunk, with ``--accept-mindspeed-flags`` and Megatron-LM itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_dsa.tools.migrate import shell
from mindspeed_dsa.tools.migrate.job import split
from mindspeed_dsa.tools.migrate.translate import translate, words

LAUNCHER = Path(__file__).parents[3] / "examples" / "megatron_lm" / "run_megatron.py"
EVERYWHERE = """
--pipeline-model-parallel-size 1 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--seq-length 64 --micro-batch-size 1 --global-batch-size 4 --vocab-size 512 --padded-vocab-size 640
--tokenizer-type NullTokenizer --mock-data --train-iters 4 --lr-decay-iters 4 --lr-warmup-iters 0 --lr 1e-3
"""
DATA = "--load --save --data-path --tokenizer-name-or-path --split"
SCRIPTS = {
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
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout + done.stderr
    return printed, [float(loss) for loss in re.findall(r"lm loss: (\S+)", printed)]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not {"MEGATRON_LM", "MINDSPEED_LLM"} <= set(os.environ),
    reason="MEGATRON_LM, MINDSPEED_LLM name no checkouts",
)
@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_shrunk_script_trains_as_stock_megatron_does(script: str) -> None:
    sizes, without, features = SCRIPTS[script]
    path = Path(os.environ["MINDSPEED_LLM"]) / "examples" / "mcore" / script
    _, old = split(shell.read(path.read_text(encoding="utf-8")).words)
    _, new = split(f"{EVERYWHERE} {sizes}".split())
    replaced = {given.flag for given in new} | {*DATA.split(), *without.split()}
    flags = [*(given for given in old if given.flag not in replaced), *new]

    printed, losses = train(["--accept-mindspeed-flags", *words(flags)])
    assert "not needed here: " in printed
    for feature in features:
        assert re.search(rf"^{feature} .*applied", printed, re.MULTILINE), feature
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.05

    found = translate(flags)
    stock = [
        given for given in found.flags if given.flag not in {each.given.flag for each in found.of("same")}
    ]
    fusions = ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion"]
    printed, others = train([*words(stock), *fusions])
    assert not re.search(rf"^({'|'.join(features)}) .*applied", printed, re.MULTILINE)
    assert losses == pytest.approx(others, rel=1e-3)
