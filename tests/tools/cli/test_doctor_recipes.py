"""The checks behind ``doctor`` accept published recipes of DeepSeek-V3.2 and GLM-5 with fused DSA.

The flags are those that Megatron-Bridge (commit 067f987d) and MindSpeed-LLM (commit c77308a1) set, in
Megatron-LM's spelling.
"""

from __future__ import annotations

import pytest

from mindspeed_dsa.features.dsa.repairs import feature as repairs
from mindspeed_dsa.features.moe.permute_fusion import feature as permute_fusion
from tests.combinations.options import Base

COMMON = """
--multi-latent-attention --qk-layernorm --experimental-attention-variant dsa --dsa-indexer-loss-coeff 0.001
--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --kv-lora-rank 512
--qk-pos-emb-head-dim 64 --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8
--moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --moe-grouped-gemm --moe-permute-fusion --bf16
--use-distributed-optimizer --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--micro-batch-size 1 --expert-tensor-parallel-size 1 --no-rope-fusion --use-fused-dsa
"""
GLM = f"""{COMMON} --num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288 --num-attention-heads 64
--q-lora-rank 2048 --qk-head-dim 192 --v-head-dim 256 --moe-layer-freq ([0]*3+[1]*75) --rope-type rope
--vocab-size 154880 --max-position-embeddings 202752
"""
BRIDGE = f"""{GLM} --transformer-impl transformer_engine --mtp-num-layers 1 --calculate-per-token-loss
--expert-model-parallel-size 32
"""
LONG = f"{BRIDGE} --seq-length 131072 --context-parallel-size 32 --cp-comm-type allgather"
EVEN = """--pipeline-model-parallel-size 6 --decoder-first-pipeline-num-layers 14
--decoder-last-pipeline-num-layers 16"""
DEEPEP, HYBRIDEP = (
    f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {name}"
    for name in ("deepep", "hybridep")
)
GROUPS = "|".join(["Et", "t", *["", "tttt|tttt|tttt|tttt"] * 4, "", "tttt", "tttt", "ttttmL"])
ASCEND = """--transformer-impl local --sequence-parallel --expert-model-parallel-size 64 --swap-optimizer
--use-flash-attn --moe-token-dispatcher-type alltoall --seq-length 4096 --fused-linear-cross-entropy
--fused-operators rmsnorm swiglu rotary-pos-emb --ckpt-format torch --gemm-gradient-accumulation-fusion
"""
RECIPES = {
    "Megatron-Bridge, GLM-5.1, H100": (
        416,
        (
            f"{LONG} --dsa-model glm-5.1 {DEEPEP} --global-batch-size 520 --pipeline-model-parallel-size 13 "
            "--num-virtual-stages-per-pipeline-rank 2"
        ),
    ),
    "Megatron-Bridge, GLM-5.2, H100": (
        416,
        (
            f"{LONG} --dsa-model glm-5.2 {DEEPEP} --global-batch-size 520 --pipeline-model-parallel-size 13 "
            f"--pipeline-model-parallel-layout {GROUPS}"
        ),
    ),
    "Megatron-Bridge, GLM-5.1, GB200": (
        192,
        (f"{LONG} --dsa-model glm-5.1 {HYBRIDEP} --global-batch-size 56 {EVEN}"),
    ),
    "Megatron-Bridge, GLM-5.2, GB200": (
        192,
        (f"{LONG} --dsa-model glm-5.2 {HYBRIDEP} --global-batch-size 56 {EVEN}"),
    ),
    "Megatron-Bridge, GLM-5.2, pretraining": (
        192,
        (
            f"{BRIDGE} --dsa-model glm-5.2 --moe-token-dispatcher-type alltoall --global-batch-size 1024 "
            f"{EVEN} "
            "--seq-length 4096 --use-precision-aware-optimizer"
        ),
    ),
    "MindSpeed-LLM, DeepSeek-V3.2": (
        1024,
        (
            f"{COMMON} {ASCEND} --dsa-model deepseek-v3.2 --num-layers 61 --hidden-size 7168 "
            "--ffn-hidden-size 18432 "
            "--num-attention-heads 128 --q-lora-rank 1536 --qk-head-dim 128 --v-head-dim 128 "
            "--moe-layer-freq ([0]*3+[1]*58) --moe-router-num-groups 8 --moe-router-group-topk 4 "
            "--mtp-num-layers 1 "
            "--moe-fb-overlap --global-batch-size 7680 --tensor-model-parallel-size 4 "
            "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout "
            f"Ett|tt|tt|t|{'|'.join(['tt'] * 27)}|mL"
        ),
    ),
    "MindSpeed-LLM, GLM-5.2": (
        128,
        (
            f"{GLM} {ASCEND} --dsa-model glm-5.2 --moe-router-load-balancing-type none "
            "--global-batch-size 2048 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 "
            "--pipeline-model-parallel-layout "
            "Etttttttttt|tttttttttttt|tttttttt|tttttttt|tttttttt|tttttttttttt|tttttttttttt|ttttttttL"
        ),
    ),
}
"""Number of ranks, and flags."""


@pytest.fixture
def with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the checks take Transformer Engine for installed, as on the machines of these recipes."""
    for module in (repairs, permute_fusion):
        monkeypatch.setattr(module, "find_spec", lambda name: name)


@pytest.mark.parametrize("name", RECIPES)
def test_published_recipes_are_accepted(name: str, with_transformer_engine: None):
    ranks, words = RECIPES[name]
    assert Base(tuple(words.split()), ranks).problems() == []


def test_flex_dispatchers_permute_with_transformer_engine_alone():
    ranks, words = RECIPES["Megatron-Bridge, GLM-5.2, GB200"]
    local = words.replace("transformer_engine", "local").split()
    (problem,) = Base(tuple(local), ranks).problems()
    assert "flex permutes for its own kernels" in problem
