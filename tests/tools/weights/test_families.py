"""Architectures without latent attention: losses and files are those of transformers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.tools.weights import families
from tests.tools.weights.models import FILE, done, same, tensors_of, weights

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

TRAIN = "tests.tools.weights.families:train"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2+SP": {"tp": 2},
    "PP2 x VPP2": {"pp": 2, "vpp": 2},
    "EP2": {"ep": 2},
    "EP2, grouped": {"ep": 2, "grouped": True},
    "CP2": {"cp": 2},
}
DENSE = ("qwen2", "qwen3", "llama")
CASES = [
    pytest.param(
        kind,
        layout,
        marks=() if layout == "one process" and kind in ("llama", "qwen3_moe") else pytest.mark.full,
    )
    for kind in families.MODELS
    for layout in LAYOUTS
    if not (kind in DENSE and layout.startswith("EP"))
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_losses_are_those_of_transformers(pool: Any, tmp_path: Path, kind: str, layout: str) -> None:
    """In training, and of the model that is exported afterwards."""
    model, checkpoints = families.write(kind, tmp_path / "model"), tmp_path / "checkpoints"
    done(
        "import", tmp_path / "model", checkpoints, "--dtype", "float32", "--",
        "--make-vocab-size-divisible-by", 1,
    )  # fmt: skip
    sizes = LAYOUTS[layout]
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("ep", 1)
    results = pool.run(
        TRAIN, ranks, files=str(tmp_path / "model"), checkpoint=str(checkpoints / "release"),
        saved=str(tmp_path / "trained"), **sizes,
    )  # fmt: skip
    expected = families.losses_of(model)
    assert expected[0] - expected[-1] > 0.05
    for losses, differing in results:
        assert differing == []
        assert losses == pytest.approx(expected if losses else [], rel=1e-5)
    assert any(losses for losses, _ in results)

    done("export", tmp_path / "trained", tmp_path / "out", "--dtype", "float32")
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        # The other model took the same ten steps in transformers; rounding has grown to 2.5e-4.
        torch.testing.assert_close(
            families.logits_of(loaded)[0], families.logits_of(model)[0], rtol=1e-3, atol=1e-3
        )
        assert float(families.loss_of(loaded)) == pytest.approx(expected[-1], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        (
            "qwen3",
            {"num_key_value_heads": 4},
            "k_proj.weight is [16, 32], and in config.json",
        ),
        ("llama", {"head_dim": 4}, "in config.json num_key_value_heads * head_dim make 8"),
        ("qwen3_moe", {"moe_intermediate_size": 8}, "in config.json moe_intermediate_size is 8"),
        ("mixtral", {"num_local_experts": 8}, "in config.json num_local_experts is 8"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    tmp_path: Path, kind: str, changed: dict[str, int], said: str
) -> None:
    families.write(kind, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    status, text = weights("import", tmp_path / "model", tmp_path / "checkpoints")
    assert status == 2
    assert said in text


@pytest.mark.parametrize("kind", families.MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_the_same_file_comes_out(tmp_path: Path, kind: str, dtype: str) -> None:
    model = families.write(kind, tmp_path / "model").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model")
    flags = shlex.split(done("flags", tmp_path / "model"))
    done("import", tmp_path / "model", tmp_path / "checkpoints", "--dtype", dtype, "--", *flags)
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--dtype", dtype, "--like", tmp_path / "model")
    assert (tmp_path / "out" / FILE).read_bytes() == (tmp_path / "model" / FILE).read_bytes()
    done("export", tmp_path / "checkpoints", tmp_path / "alone", "--dtype", dtype)
    assert same(tensors_of(tmp_path / "alone"), tensors_of(tmp_path / "model"))


def test_a_model_without_ids_of_tokens_is_written_again(tmp_path: Path) -> None:
    """Published models often lack a token for padding or for the beginning; transformers reads null then."""
    import transformers

    families.write("qwen2", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    kept = json.loads(file.read_text()) | {"eos_token_id": 5}
    file.write_text(
        json.dumps({key: kept[key] for key in kept if key not in ("bos_token_id", "pad_token_id")})
    )
    done("import", tmp_path / "model", tmp_path / "checkpoints")
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--like", tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 5, None)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "mixtral" else pytest.mark.full)
        for kind in families.MODELS
        if kind not in DENSE
    ],
)
def test_names_that_transformers_has_in_memory_are_read(tmp_path: Path, kind: str) -> None:
    model = families.write(kind, tmp_path / "apart")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    apart, fused = tensors_of(tmp_path / "apart"), tensors_of(tmp_path / "fused")
    # A tensor for 4 experts in place of 4 tensors, and one for gates and upper projections.
    assert 0 < sum("mlp.experts." in name for name in fused) == sum(".experts." in name for name in apart) / 6
    done("import", tmp_path / "fused", tmp_path / "checkpoints", "--dtype", "float32")
    done("export", tmp_path / "checkpoints", tmp_path / "out", "--dtype", "float32")
    assert same(tensors_of(tmp_path / "out"), apart)
    done("check", tmp_path / "fused")

    layer = next(name for name in fused if name.endswith("experts.down_proj")).partition("mlp.")[0]
    twice = next(name for name in apart if name.startswith(layer) and ".experts.0." in name)
    save_file(fused | {twice: apart[twice].clone()}, tmp_path / "fused" / FILE, {"format": "pt"})
    status, text = weights("import", tmp_path / "fused", tmp_path / "other")
    assert status == 2
    assert f"holds {twice}, which is there by itself too" in text
