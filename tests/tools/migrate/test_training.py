"""Launch scripts of MindSpeed-LLM, shrunk, with ``--accept-mindspeed-flags`` and Megatron-LM itself.

Scripts of DeepSeek-V3.2, GLM-5 and GLM-5.2 begin with weights written by transformers: by the conversion that
the script requests, by ``--load`` of a folder that MindSpeed-LLM converts by itself, and by an import.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file

from mindspeed_dsa.tools.migrate import shell
from mindspeed_dsa.tools.migrate.job import Given, split
from mindspeed_dsa.tools.migrate.translate import translate, words
from tests.matrix.hugging_face import loss_of_transformers
from tests.tools.weights import models

ROOT = Path(__file__).parents[3]
LAUNCHER = ROOT / "examples" / "megatron_lm" / "run_megatron.py"
RECORDED = ROOT / "tests" / "matrix" / "recorded_pretrain.py"
SAMPLES = 4
"""Samples of a step."""
EVERYWHERE = """
--pipeline-model-parallel-size 1 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--seq-length 64 --micro-batch-size 1 --global-batch-size 4 --vocab-size 512 --padded-vocab-size 640
--tokenizer-type NullTokenizer --mock-data --train-iters 4 --lr-decay-iters 4 --lr-warmup-iters 0 --lr 1e-3
"""
DATA = "--load --save --data-path --tokenizer-name-or-path --split"
SPARSE = """--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --q-lora-rank 32 --kv-lora-rank 32
--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --num-experts 8 --moe-ffn-hidden-size 32
--moe-shared-expert-intermediate-size 32 --moe-router-topk 2 --index-n-heads 32 --index-head-dim 16
--index-topk 16 --first-k-dense-replace 1"""
FOUR_LAYERS = "--num-layers 4 --noop-layers 3"
OF_A_PIPELINE = "--num-layers-per-virtual-pipeline-stage"
FUSED = ("fused-dsa", "dsa-absorb", "swap-optimizer", "fused-rmsnorm", "fused-swiglu")
KERNELS = "--use-dsa-absorb --use-fused-sparse-flash-attention --use-fused-lightning-indexer-kl-loss"
"""Names of the translation's kernels; without them Megatron's own functions attend, head by head."""
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
        "--reset-attention-mask --sequence-parallel",
        ("swap-optimizer", "moe-fb-overlap", "fused-rmsnorm", "fused-swiglu"),
    ),
    "qwen25/pretrain_qwen25_72b_4k_pack.sh": (
        """--tensor-model-parallel-size 2 --num-layers 2 --num-query-groups 2 --max-position-embeddings 64""",
        "--num-layers-per-virtual-pipeline-stage",
        ("reuse-fp32-param", "recompute-activation-function", "swap-attention", "ascend-coc"),
    ),
}


def run(words: list[str], batches: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a job on two ranks, which write their first batches to a folder if one is given."""
    checkout = Path(os.environ["MEGATRON_LM"])
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "BATCHES": str(batches)}
    script = RECORDED if batches else checkout / "pretrain_gpt.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(LAUNCHER), str(script), *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=checkout,
        timeout=800,
    )


def train(words: list[str], batches: Path | None = None) -> tuple[str, list[float]]:
    """Return the output of two ranks, and the loss of each step."""
    done = run(words, batches)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout + done.stderr
    return printed, [float(loss) for loss in re.findall(r"lm loss: (\S+)", printed)]


def shrunk(script: str, more: str = "", less: str = "") -> list[Given]:
    """Return a script's flags with small sizes, two ranks and mock data; add ``more``, remove ``less``."""
    sizes, without, _ = SCRIPTS[script]
    path = Path(os.environ["MINDSPEED_LLM"]) / "examples" / "mcore" / script
    _, old = split(shell.read(path.read_text(encoding="utf-8")).words)
    _, new = split(f"{EVERYWHERE} {sizes} {more}".split())
    replaced = {given.flag for given in new} | {*DATA.split(), *without.split(), *less.split()}
    kept = (given for given in old if given.flag not in replaced)
    return [*map(without_unset, kept), *new]


def without_unset(given: Given) -> Given:
    """Leave out variables that a script has not set, as a shell does."""
    return Given(given.flag, tuple(value for value in given.values if not value.startswith("$")))


def release() -> Version:
    """Return the checkout's release, for which ``--accept-mindspeed-flags`` translates."""
    text = (Path(os.environ["MEGATRON_LM"]) / "megatron" / "core" / "package_info.py").read_text()
    return Version(".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)))


def stock(flags: Sequence[Given]) -> list[str]:
    """Return the same job's command line without this library's features."""
    translation = translate(flags, release())
    ours = {each.given.flag for each in translation.of("same")} | {*KERNELS.split()}
    fusions = ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion"]
    return [*words([given for given in translation.flags if given.flag not in ours]), *fusions]


# -- weights -----------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
    "n_routed_experts": 8, "routed_scaling_factor": 2.5, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "index_n_heads": 32, "index_topk": 16, "num_hidden_layers": 3,
}  # fmt: skip
"""Sizes of the shrunk scripts."""
YARN = {
    "rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
IMPORTED_FORMAT = "--ckpt-format torch_dist"
"""Scripts use the format torch, which imports do not read."""
IN_PAIRS = "--apply-rope-no-in-complex"
HEAD = 8.0
"""Factor of the output layer's weights; it makes the loss differ clearly from random weights' loss."""


@dataclass(frozen=True)
class Weights:
    """A script's model in transformers' files, and its way into the job.

    Attributes:
        kind: ``model_type``.
        sizes: sizes in addition to :data:`SIZES`.
        predictions: number of layers of multi-token prediction.
        imported: whether a checkpoint is written first; otherwise the job reads the files.
        lacks: flag without which the script trains another model than the released one.
    """

    kind: str
    sizes: Mapping[str, Any]
    predictions: int = 1
    imported: bool = False
    lacks: str = ""

    def write(self, folder: Path) -> Path:
        """Write the model's files."""
        torch.manual_seed(0)
        models.write(self.kind, folder, predictions=self.predictions, **{**SIZES, **self.sizes})
        tensors = models.tensors_of(folder)
        for name in tensors:
            if name.endswith(("lm_head.weight", "shared_head.head.weight")):
                tensors[name] = tensors[name] * HEAD
        save_file(tensors, folder / models.FILE, {"format": "pt"})
        return folder


WEIGHTS = {
    "deepseek32/pretrain_deepseek32_671b_4k_A3_ptd.sh": Weights(
        "deepseek_v32",
        {
            "n_group": 2,
            "max_position_embeddings": 163840,
            "rope_parameters": {
                **YARN,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "glm5/pretrain_glm5_744b_4k_A3_ptd.sh": Weights(
        "glm_moe_dsa",
        {
            "index_topk_freq": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e6,
                "original_max_position_embeddings": 202752,
            },
        },
        lacks=IN_PAIRS,
    ),
    "glm52/pretrain_glm52_744b_4k_A3_ptd.sh": Weights(
        "glm_moe_dsa",
        {
            "num_hidden_layers": 5,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
        },
        predictions=0,
        imported=True,
    ),
}


def imported(files: Path, target: Path, script: str) -> Path:
    """Import a model for a script's job."""
    flags = translate(shrunk(script, IMPORTED_FORMAT), release()).flags
    command = [sys.executable, "-m", "mindspeed_dsa", "weights", "import", str(files), str(target), "--"]
    done = subprocess.run([*command, *words(flags)], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not {"MEGATRON_LM", "MINDSPEED_LLM"} <= set(os.environ),
    reason="MEGATRON_LM, MINDSPEED_LLM name no checkouts",
)
@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_shrunk_script_trains_as_stock_megatron_does(script: str, tmp_path: Path) -> None:
    model_weights, batches, load = WEIGHTS.get(script), tmp_path / "batches", ""
    batches.mkdir()
    if model_weights:
        source = files = model_weights.write(tmp_path / "files")
        if model_weights.imported:
            source = imported(files, tmp_path / "imported", script)
        load = f"--load {source} {IMPORTED_FORMAT if model_weights.imported else ''}"
        if model_weights.lacks:
            refused = run(["--accept-mindspeed-flags", *words(shrunk(script, load))])
            assert refused.returncode != 0
            assert "dsa_indexer_rope_interleaved is False here and True in the files" in refused.stderr
            load = f"{load} {model_weights.lacks}"
    flags, (*_, features) = shrunk(script, load), SCRIPTS[script]
    printed, losses = train(["--accept-mindspeed-flags", *words(flags)], batches if model_weights else None)
    assert "not needed here: " in printed
    for feature in features:
        assert re.search(rf"^{feature} .*applied", printed, re.MULTILINE), feature
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.05
    if model_weights:
        assert str(source) in printed
        expected = loss_of_transformers(files, batches, SAMPLES)
        assert expected > 1.2 * math.log(SIZES["vocab_size"]), "weights that are drawn have that logarithm"
        # Rounding in bf16 sends some tokens to other experts.
        assert losses[0] == pytest.approx(expected, rel=1e-2)
        flags = shrunk(script, load, "--bf16")
        _, losses = train(["--accept-mindspeed-flags", *words(flags)])
        assert losses[0] == pytest.approx(expected, rel=1e-5)

    printed, others = train(stock(flags))
    alone = set(features) - {"dsa-shared-selections"}  # part of the model
    assert not re.search(rf"^({'|'.join(alone)}) .*applied", printed, re.MULTILINE)
    # Attention and experts of a model with large weights are chaotic: digits of step 2 decide step 3.
    comparable, digits = (2, 1e-4) if model_weights else (4, 1e-3)
    assert losses[:comparable] == pytest.approx(others[:comparable], rel=digits)
