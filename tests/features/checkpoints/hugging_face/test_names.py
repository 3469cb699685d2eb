"""Names of weights: they are those in transformers' models, and both directions are inverse."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import ARCHITECTURES, of_class
from mindspeed_dsa.features.checkpoints.hugging_face.names import Place, Shape, UnknownName, place_of

KINDS = ("DeepseekV3", "DeepseekV32", "GlmMoeDsa")
SHARING = {"dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3}


def arguments(kind: str, **more: object) -> SimpleNamespace:
    sparse = {} if kind == "DeepseekV3" else {"experimental_attention_variant": "dsa"}
    sparse |= SHARING if kind == "GlmMoeDsa" else {}
    return SimpleNamespace(
        num_layers=8,
        num_experts=4,
        moe_layer_freq=[0] + [1] * 7,
        q_lora_rank=24,
        moe_shared_expert_intermediate_size=16,
        **sparse,
        **more,
    )


def shape_of(kind: str, **more: object) -> Shape:
    table = of_class({"architectures": [f"{kind}ForCausalLM"]})
    assert table is not None
    return Shape.of(arguments(kind, **more), table)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_writes_these_names(kind: str, tmp_path) -> None:
    transformers = pytest.importorskip("transformers", "5.20")
    from safetensors import safe_open

    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 16)
    indexer = {} if kind == "DeepseekV3" else {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
    rule = {"index_topk_freq": 4, "index_skip_topk_offset": 3} if kind == "GlmMoeDsa" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32, **sizes, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=2,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
        kv_lora_rank=8, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1, **indexer, **rule,
    )  # fmt: skip
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = set(file.keys())
    shape = shape_of(kind)
    ours = [name for place in shape.places() for name in shape.names(place)]
    assert set(ours) == written
    assert len(ours) == len(set(ours))


def key_of(place: Place, inner: str, stacked: bool) -> tuple[str, tuple[int, ...]]:
    """Return a key and an offset that Megatron may use for a tensor."""
    if not place.block:
        return place.name, ()
    offset = (place.layer,) if stacked else ()
    number = "" if stacked else f"{place.layer}."
    within = inner if place.inner else ""
    offset += (place.expert,) if place.expert >= 0 else ()
    return f"{place.block}.layers.{number}{within}{place.name}", offset


@pytest.mark.parametrize("inner", ["transformer_layer.", "mtp_model_layer."])
@pytest.mark.parametrize("stacked", [False, True])
def test_keys_are_told_from_each_other(inner: str, stacked: bool) -> None:
    shape = shape_of("GlmMoeDsa", mtp_num_layers=2)
    places = list(shape.places())
    assert {place.layer for place in places if place.block == "mtp"} == {0, 1}
    for place in places:
        key, offset = key_of(place, inner, stacked)
        assert place_of(key, (*offset, 5, 7)) == (place, len(offset))
    theirs = [name for place in places for name in shape.names(place)]
    assert len(theirs) == len(set(theirs))


def test_only_computing_layers_own_an_indexer() -> None:
    places = list(shape_of("GlmMoeDsa", mtp_num_layers=2).places())
    owners = {(place.block, place.layer) for place in places if place.indexer}
    # Counted from 1, layers 1, 2, 3 and 7 of the decoder and both multi-token prediction layers own an
    # indexer.
    assert owners == {*(("decoder", layer) for layer in (0, 1, 2, 6)), ("mtp", 0), ("mtp", 1)}


def test_a_repeated_layer_of_multi_token_prediction_has_weights_once() -> None:
    repeated = shape_of("GlmMoeDsa", mtp_num_layers=3, mtp_use_repeated_layer=True)
    assert repeated == shape_of("GlmMoeDsa", mtp_num_layers=1)


def test_norms_that_are_part_of_projections_are_the_same() -> None:
    for other, name in (
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm"),
        ("decoder.layers.3.self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm"),
        ("decoder.layers.3.self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm"),
    ):
        assert shape_of("DeepseekV3").names(place_of(other)[0]) == (f"model.layers.3.{name}.weight",)


def test_an_unknown_tensor_is_named() -> None:
    with pytest.raises(UnknownName, match=r"decoder\.layers\.3\.mlp\.linear_fc3\.weight"):
        place_of("decoder.layers.3.mlp.linear_fc3.weight")


def test_gate_comes_before_up() -> None:
    for tensors in (each.tensors for each in ARCHITECTURES):
        for parts in (*tensors.dense.values(), *tensors.shared.values(), *tensors.experts.values()):
            for first, second in pairwise(parts):
                names = [name.split(".")[-2] for name in (first, second)]
                assert names in (["gate_proj", "up_proj"], ["w1", "w3"])
