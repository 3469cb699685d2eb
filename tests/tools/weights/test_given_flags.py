"""``weights import`` accepts the flags that ``weights flags`` prints, and compares each one that is given."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from mindspeed_dsa.features.checkpoints.hugging_face.flags import flags_of, flags_of_training
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.weights import job
from mindspeed_dsa.tools.weights.model import release_here
from tests.features.checkpoints.hugging_face.models import KINDS, YARN, config

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 8000000.0},
    "deepseek": YARN,
    "kimi": YARN | {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0},
    "another length": YARN | {"original_max_position_embeddings": 2048},
    "another end": YARN | {"beta_slow": 2.0},
    "another magnitude": YARN | {"mscale": 0.707},
}
SHARED = {"index_topk_freq": 2, "index_skip_topk_offset": 1}


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "weights_of", lambda folder: None)


def wanted(file: dict[str, Any], words: list[str], folder: Path) -> job.Import:
    (folder / "config.json").write_text(json.dumps(file))
    return job.import_of(folder, folder / "target", words, None)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", [*KINDS, "kimi_k2"])
@pytest.mark.parametrize("shared", [{}, SHARED, {"index_topk_pattern": "FFSFSS"}], ids=str)
def test_printed_flags_are_accepted(kind: str, rope: str, shared: Any, tmp_path: Path) -> None:
    dense = kind in ("deepseek_v3", "kimi_k2")
    file = config("deepseek_v3" if dense else kind, rope_parameters=ROPES[rope], **({} if dense else shared))
    file["model_type"] = kind
    lines = [*flags_of(file, release_here(), "test"), *flags_of_training(file, False, "test")]
    found = wanted(file, [word for line in lines for word in shlex.split(line)], tmp_path)
    assert found.values["rotary_base"] == int(ROPES[rope]["rope_theta"])


@pytest.mark.parametrize("model", ["glm-5", "glm-5.2"])
def test_a_model_stands_for_its_flags(model: str, tmp_path: Path) -> None:
    shared = {"index_topk_freq": 4, "index_skip_topk_offset": 3} if model == "glm-5.2" else {}
    words = ["--experimental-attention-variant", "dsa", "--dsa-model", model]
    wanted(config("glm_moe_dsa", **shared), words, tmp_path)
    with pytest.raises(
        SettingsError, match="dsa_indexer_rope_interleaved is True here and False in the files"
    ):
        wanted(config("deepseek_v32", **shared), words, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--yarn-beta-fast 17", "beta_fast is 17 here and 32 in the files: give --yarn-beta-fast 32.0"),
        ("--yarn-beta-slow 2", "give --yarn-beta-slow 1.0"),
        ("--yarn-original-max-position-embeddings 77", "give --yarn-original-max-position-embeddings 4096"),
        ("--rotary-base 77", "give --rotary-base 10000"),
        ("--rotary-scaling-factor 4", "give --rotary-scaling-factor 40.0 --rope-type yarn"),
        ("--rope-type rope", "give --rotary-scaling-factor 40.0 --rope-type yarn"),
        ("--mscale 0.5", "give --mscale 1 --mscale-all-dim 1"),
        ("--moe-router-num-groups 8", "give --moe-router-num-groups 4"),
        ("--dsa-indexer-topk 7", "give --dsa-indexer-topk 16"),
        ("--dsa-indexer-topk-freq 1", "give --dsa-indexer-topk-freq 2"),
        ("--dsa-indexer-topk-pattern CCCCCS", "give --dsa-indexer-topk-freq 2"),
    ],
)
def test_one_wrong_flag_is_refused(words: str, said: str, tmp_path: Path) -> None:
    file = config("glm_moe_dsa", rope_parameters=YARN, **SHARED)
    with pytest.raises(SettingsError) as caught:
        wanted(file, words.split(), tmp_path)
    assert said in str(caught.value)
    assert str(caught.value).count(" in the files") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--activation-func-clamp-value 7", "omit --activation-func-clamp-value"),
        ("--apply-layernorm-1p", "omit --apply-layernorm-1p"),
        ("--glu-linear-offset 1", "give --glu-linear-offset 0.0"),
        ("--moe-apply-probs-on-input", "omit --moe-apply-probs-on-input"),
        ("--moe-router-load-balancing-type sinkhorn", "give --moe-router-load-balancing-type aux_loss"),
        ("--softmax-type off-by-one", "give --softmax-type vanilla"),
        ("--use-mup", "omit --use-mup"),
        ("--window-size 127,0 --window-attn-skip-freq 4", "omit --window-size"),
    ],
)
def test_a_flag_of_no_known_architecture_is_refused(words: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        wanted(config("qwen3_moe"), words.split(), tmp_path)
    assert said in str(caught.value)
    wanted(config("qwen3_moe"), ["--softmax-type", "vanilla", "--window-attn-skip-freq", "4"], tmp_path)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("--vocab-size 1023", None),
        ("--vocab-size 769 --tensor-model-parallel-size 2", None),
        ("--vocab-size 896", 896),
        ("--vocab-size 1023 --make-vocab-size-divisible-by 1", 1023),
    ],
)
def test_a_vocabulary_is_padded_before_it_is_compared(words: str, rows: int | None, tmp_path: Path) -> None:
    file = config("qwen3_moe", vocab_size=1024)
    if rows is None:
        assert wanted(file, words.split(), tmp_path).vocabulary == 1024
        return
    with pytest.raises(SettingsError, match=f"vocab_size is {rows} here and 1024 in the files"):
        wanted(file, words.split(), tmp_path)
