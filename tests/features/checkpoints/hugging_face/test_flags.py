"""Model flags per release; where a Megatron-LM checkout is given, its parser reads the same."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.features.checkpoints.hugging_face.config import arguments_of
from mindspeed_dsa.features.checkpoints.hugging_face.flags import (
    ALWAYS_SINCE_0_19,
    before_0_14,
    flags_of,
    pattern,
)
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.versions import version_in_source
from tests.features.checkpoints.hugging_face.models import LLAMA_3, WHERE, YARN, config

pytest.importorskip("transformers", minversion="5.23")

ROOT = Path(__file__).parents[4]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("deepseek_v3", {"rope_parameters": YARN, "q_lora_rank": None}),
    "dense, plain": ("deepseek_v3", {"tie_word_embeddings": True, "num_nextn_predict_layers": 0}),
    "sparse": ("deepseek_v32", {"rope_parameters": YARN}),
    "pairs": ("glm_moe_dsa", {"rope_parameters": {"rope_type": "default", "rope_theta": 8000000.0}}),
    "shared": ("glm_moe_dsa", {"index_topk_freq": 2, "index_skip_topk_offset": 1}),
    "biases": ("qwen2", {"tie_word_embeddings": True}),
    "norms of heads": ("qwen3", {}),
    "gated shared expert": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "normalised": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "llama3": ("llama", {"rope_parameters": LLAMA_3}),
    "experts only": ("mixtral", {}),
    "pattern": ("glm_moe_dsa", {"index_topk_pattern": "FFSFSS", "n_group": 1, "topk_group": 1}),
}


def test_flags_of_a_model():
    lines = flags_of(config("deepseek_v32", rope_parameters=YARN), "0.16.1", WHERE)
    assert sorted(lines) == sorted(
        """--num-layers 6
        --hidden-size 64
        --ffn-hidden-size 128
        --num-attention-heads 4
        --vocab-size 1000
        --padded-vocab-size 1024
        --q-lora-rank 40
        --kv-lora-rank 24
        --qk-head-dim 16
        --qk-pos-emb-head-dim 8
        --v-head-dim 12
        --multi-latent-attention
        --qk-layernorm
        --num-experts 8
        --moe-layer-freq '([0]*2+[1]*4)'
        --moe-ffn-hidden-size 32
        --moe-shared-expert-intermediate-size 64
        --moe-router-topk 4
        --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias
        --moe-router-num-groups 4
        --moe-router-group-topk 2
        --moe-router-topk-scaling-factor 2.5
        --moe-router-dtype fp32
        --mtp-num-layers 1
        --experimental-attention-variant dsa
        --dsa-indexer-n-heads 3
        --dsa-indexer-head-dim 32
        --dsa-indexer-topk 16
        --dsa-indexer-rope-first
        --dsa-indexer-normalised-query
        --dsa-indexer-k-norm-epsilon 1e-06
        --position-embedding-type rope
        --rope-type yarn
        --no-rope-fusion
        --rotary-base 10000
        --rotary-scaling-factor 40.0
        --mscale 1.0
        --mscale-all-dim 1.0
        --max-position-embeddings 163840
        --normalization RMSNorm
        --norm-epsilon 1e-06
        --swiglu
        --disable-bias-linear
        --untie-embeddings-and-output-weights
        --hidden-dropout 0.0
        --attention-dropout 0.0""".replace("        ", "").splitlines()
    )


def test_flags_of_grouped_queries():
    lines = flags_of(config("qwen3_moe", mlp_only_layers=[1]), "0.16.1", WHERE)
    assert sorted(lines) == sorted(
        """--num-layers 6
        --hidden-size 64
        --ffn-hidden-size 128
        --num-attention-heads 8
        --group-query-attention
        --num-query-groups 2
        --kv-channels 16
        --qk-layernorm
        --vocab-size 1000
        --padded-vocab-size 1024
        --num-experts 8
        --moe-layer-freq '([1]*1+[0]*1+[1]*4)'
        --moe-ffn-hidden-size 32
        --moe-router-topk 4
        --moe-router-score-function softmax
        --moe-router-pre-softmax
        --moe-router-dtype fp32
        --position-embedding-type rope
        --rotary-base 10000
        --max-position-embeddings 32768
        --normalization RMSNorm
        --norm-epsilon 1e-06
        --swiglu
        --disable-bias-linear
        --untie-embeddings-and-output-weights
        --hidden-dropout 0.0
        --attention-dropout 0.0""".replace("        ", "").splitlines()
    )
    assert "--add-qkv-bias" in flags_of(config("qwen2"), "0.12.1", WHERE)
    assert {"--use-rope-scaling", "--rope-scaling-factor 8.0"} <= {
        *flags_of(config("llama", rope_parameters=LLAMA_3), "0.12.1", WHERE)
    }
    assert "--moe-shared-expert-gate" in flags_of(config("qwen2_moe"), "0.16.1", WHERE)
    with pytest.raises(SettingsError, match=r"the shared expert has a gate.*use 0\.16 or later"):
        flags_of(config("qwen2_moe"), "0.14.0", WHERE)


def test_releases_have_flags_of_their_own():
    file = config("deepseek_v32", rope_parameters=YARN)
    by_release = {release: {*flags_of(file, release, WHERE)} for release in ("0.12.1", "0.16.1", "0.19.0")}
    old, usual, native = by_release.values()
    assert usual - old == {"--rope-type yarn", "--padded-vocab-size 1024", "--max-position-embeddings 163840"}
    assert old - usual == {"--max-position-embeddings 4096"}, "where YaRN's original length is read"
    assert usual - native == {"--dsa-indexer-rope-first", "--dsa-indexer-normalised-query"}, "always there"
    assert native <= usual


def test_numbers_of_yarn_that_are_not_the_usual_ones():
    rope = YARN | {"original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0}
    file = config("deepseek_v3", rope_parameters=rope)
    betas = {"--yarn-beta-fast 16.0", "--yarn-beta-slow 2.0"}
    assert {"--yarn-original-max-position-embeddings 32", *betas} <= {*flags_of(file, "0.16.1", WHERE)}
    assert {"--max-position-embeddings 32", *betas} <= {*flags_of(file, "0.12.1", WHERE)}


def test_what_a_release_cannot_compute_is_refused():
    file = config("deepseek_v3", rope_parameters=YARN | {"mscale": 0.5})
    assert "--mscale 0.5" in flags_of(file, "0.14.0", WHERE)
    with pytest.raises(SettingsError, match=r"mscale 0.5 is not mscale_all_dim 1.*use 0\.14 or later"):
        flags_of(file, "0.13.1", WHERE)
    with pytest.raises(SettingsError, match=r"rope_theta is 10000\.5"):
        flags_of(config("deepseek_v3", rope_parameters=YARN | {"rope_theta": 10000.5}), "0.16.1", WHERE)


LOSS = ["--use-fused-dsa", "--dsa-indexer-loss-coeff 0.01", "--dsa-indexer-use-sparse-loss"]


@pytest.mark.parametrize(
    ("kind", "wish", "last"),
    [
        ("glm_moe_dsa", [], LOSS),
        ("glm_moe_dsa", ["--train"], LOSS),
        ("deepseek_v32", ["--frozen"], ["--use-fused-dsa", "--dsa-stage frozen"]),
        ("deepseek_v3", ["--train"], []),
    ],
)
def test_indexers_are_trained_or_frozen(kind, wish, last, tmp_path, capsys):
    # Stock DSA without an indexer loss would train the indexer by weight decay only, so it is never the
    # default.
    (tmp_path / "config.json").write_text(json.dumps(config(kind)))
    assert main(["weights", "flags", str(tmp_path), "--megatron", "0.16.1", *wish]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert lines == [*flags_of(config(kind), "0.16.1", WHERE), *last]


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (["--frozzen"], "it takes no --frozzen; did you mean --frozen?"),
        (["--train", "--frozen"], "not allowed with argument --train"),
        (["--frozen"], "the model has no indexers, which --frozen is about"),
    ],
)
def test_wishes_that_are_refused(wish, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config("deepseek_v3")))
    assert main(["weights", "flags", str(tmp_path), "--megatron", "0.16.1", *wish]) == 2
    assert said in capsys.readouterr().err


def test_patterns_of_experts():
    assert pattern([0, 0, 1, 1, 1]) == "([0]*2+[1]*3)"
    assert pattern([1]) == "([1]*1)"


# -- Megatron-LM's own parser -------------------------------------------------------------------

_READ = """
import json, sys
sys.path.insert(0, sys.argv.pop(1))
import mindspeed_dsa.megatron_adaptor
from megatron.training import arguments as training
from mindspeed_dsa.features.checkpoints.hugging_face import config, flags, mismatch, written_config
file, release = json.load(sys.stdin)
arguments = config.arguments_of(file, "test")
args = training.parse_args()
values = {name: flags.value_of(args, name) for name in arguments}
args = training.validate_args(args)
built = training.core_transformer_config_from_args(args)
print("FOUND" + json.dumps({
    "values": {name: value for name, value in values.items() if value is not flags.MISSING},
    "mismatches": mismatch.mismatches(arguments, args, release),
    "of the configuration": mismatch.mismatches(arguments, built, release),
    "again": config.arguments_of(written_config.config_of(args, release, "test"), "test"),
}))
"""
_STEP = (
    "--micro-batch-size 1 --seq-length 64 --transformer-impl local --lr 1e-3 --train-iters 1 "
    "--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-rope-fusion"
)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize("model", MODELS)
def test_megatrons_parser_reads_the_same(model):
    checkout = Path(os.environ["MEGATRON_LM"].split(os.pathsep)[0])
    release = version_in_source((checkout / "megatron" / "core" / "package_info.py").read_text())
    assert release is not None
    kind, changed = MODELS[model]
    file = config(kind, **changed)
    words = [word for line in flags_of(file, release, WHERE) for word in shlex.split(line)]
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(checkout), *words, *_STEP.split()],
        input=json.dumps([file, release]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    parsed_by_megatron = json.loads(done.stdout.rpartition("FOUND")[2])
    assert parsed_by_megatron["mismatches"] == []
    assert parsed_by_megatron["of the configuration"] == []

    expected = arguments_of(file, WHERE)
    again = parsed_by_megatron["again"]
    longest, length = "max_position_embeddings", "original_max_position_embeddings"
    if before_0_14(release):
        assert parsed_by_megatron["values"].pop(longest) == expected.get(length, expected[longest])
        again[longest] = expected[longest]
    assert again == expected
    unsaid = {
        name
        for name, value in parsed_by_megatron["values"].items()
        if value is None and expected[name] is not None
    }
    # These fields have defaults in Megatron, so a flag may be missing.
    assert unsaid <= {length, "beta_fast", "beta_slow", *ALWAYS_SINCE_0_19}
    parsed = {name: value for name, value in parsed_by_megatron["values"].items() if name not in unsaid}
    assert parsed == {name: expected[name] for name in parsed}
    lacking = (
        {name for name, value in expected.items() if value} - parsed_by_megatron["values"].keys() - {longest}
    )
    assert lacking <= {length, "beta_fast", "beta_slow", *(["rope_type"] if before_0_14(release) else [])}
