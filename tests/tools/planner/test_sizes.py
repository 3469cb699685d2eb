"""Parameters of plans beside those of the models that Megatron builds."""

from __future__ import annotations

from mindspeed_dsa.tools.planner import arguments, sizes

SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --padded-vocab-size 64 "
    "--seq-length 16 --micro-batch-size 1 --transformer-impl local"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 12 --qk-layernorm --position-embedding-type rope --experimental-attention-variant dsa "
    "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 4"
)
MODELS = (
    "",
    "--normalization RMSNorm",
    "--disable-bias-linear",
    (
        "--disable-bias-linear --add-qkv-bias --normalization RMSNorm --swiglu --qk-layernorm "
        "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
    ),
    "--qk-layernorm",
    LATENT,
    f"{LATENT} --normalization RMSNorm --disable-bias-linear",
    "--num-experts 4 --moe-ffn-hidden-size 24 --swiglu",
)


def test_norms_and_biases_are_those_that_megatron_builds(pool):
    lines = [f"{SMALL} {more}" for more in MODELS]
    (built,) = pool.run("tests.tools.planner.cases:parameters", 1, command_lines=lines)
    planned = [
        sum(each.numbers for each in sizes.model_weights(arguments.job_of(line.split()).model))
        for line in lines
    ]
    assert dict(zip(MODELS, planned, strict=True)) == dict(zip(MODELS, built, strict=True))
