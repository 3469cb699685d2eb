from __future__ import annotations

import pytest
import torch

CASES = "tests.features.dsa.parts_of_dsa"
ERROR = "tests.support.model:error_of"


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_the_model_learns(pool, dtype):
    (losses,) = pool.run(f"{CASES}:learn", 1, steps=12, dtype=dtype)
    assert losses[-1] < 0.7 * losses[0]


def test_without_the_repair_megatron_insists_on_transformer_engine(pool):
    (error,) = pool.run(
        ERROR, 1, case=f"{CASES}:core_attentions", switches={"no_dsa_repairs": "local-provider"}
    )
    assert "only supports transformer engine" in error


def test_parameters_are_named_as_with_transformer_engine(pool):
    (names,) = pool.run(f"{CASES}:parameter_names", 1)
    attention = "self_attention"
    assert [name for name in names if name.startswith("decoder.layers.0.")] == [
        f"decoder.layers.0.{name}"
        for name in (
            "input_layernorm.weight",
            f"{attention}.core_attention.indexer.linear_wq_b.weight",
            f"{attention}.core_attention.indexer.linear_wk.weight",
            f"{attention}.core_attention.indexer.k_norm.weight",
            f"{attention}.core_attention.indexer.k_norm.bias",
            f"{attention}.core_attention.indexer.linear_weights_proj.weight",
            f"{attention}.linear_proj.weight",
            f"{attention}.linear_q_down_proj.weight",
            f"{attention}.linear_q_up_proj.weight",
            f"{attention}.linear_q_up_proj.layer_norm_weight",
            f"{attention}.linear_kv_down_proj.weight",
            f"{attention}.linear_kv_up_proj.weight",
            f"{attention}.linear_kv_up_proj.layer_norm_weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc1.layer_norm_weight",
            "mlp.linear_fc2.weight",
        )
    ]


@pytest.mark.parametrize("zero_centered", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norms_under_sequence_parallelism(pool, normalization, zero_centered):
    (norm,) = pool.run(f"{CASES}:norms", 1, normalization=normalization, zero_centered=zero_centered)
    hidden, weight = norm["input"].double(), norm["parameters"]["weight"].double()
    if normalization == "RMSNorm":
        expected = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    else:
        centred = hidden - hidden.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * (weight + 1 if zero_centered else weight) + norm["parameters"].get("bias", 0)
    torch.testing.assert_close(norm["output"].double(), expected, rtol=1e-5, atol=1e-5)
    assert (norm["initial"]["weight"] == (0 if zero_centered else 1)).all()
    assert norm["marks"] == [True] * len(norm["parameters"])


@pytest.mark.parametrize("cpu_initialization", [pytest.param(False, marks=pytest.mark.full), True])
def test_full_copies_start_equal_on_all_tensor_parallel_ranks(pool, cpu_initialization):
    ranks = pool.run(f"{CASES}:duplicated_linears", 2, cpu_initialization=cpu_initialization)
    copies = [name for name in ranks[0]["weights"] if "indexer.linear" in name or "_down_proj" in name]
    assert len(copies) == 2 * 5
    for name in copies:
        left, right = (rank["weights"][name] for rank in ranks)
        assert torch.equal(left, right), name
        assert left.std() == pytest.approx(ranks[0]["std"], rel=0.3), name
        assert ranks[0]["sequence parallel"][name], name
    split = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
    # Split weights differ between the ranks.
    assert not torch.equal(*(rank["weights"][split] for rank in ranks))


def test_checkpoints_do_not_depend_on_the_tensor_parallel_size(pool):
    (whole,) = pool.run(f"{CASES}:checkpoint_shards", 1, tp=1)
    split = [shard for rank in pool.run(f"{CASES}:checkpoint_shards", 2, tp=2) for shard in rank]
    expected, actual = assemble(whole), assemble(split)
    assert actual.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(actual[key], weight), key


def assemble(shards) -> dict[str, torch.Tensor]:
    """Assemble full tensors, and check that every element is written exactly once."""
    whole, writers = {}, {}
    for shard in shards:
        # Layers and experts are leading dimensions of the full tensor.
        data = shard["data"][(None,) * (len(shard["shape"]) - shard["data"].ndim)]
        # NaN and the counts show elements that no shard has.
        tensor = whole.setdefault(shard["key"], torch.full(shard["shape"], float("nan")))
        count = writers.setdefault(shard["key"], torch.zeros(shard["shape"]))
        place = tuple(
            slice(start, start + size) for start, size in zip(shard["offset"], data.shape, strict=True)
        )
        tensor[place] = data
        count[place] += 1
    assert all((count == 1).all() for count in writers.values())
    return whole


def test_grouped_gemm_falls_back_with_a_word(pool):
    (built,) = pool.run(f"{CASES}:grouped_gemm_without_its_package", 1)
    assert built["experts"] == "SequentialMLP"
    assert any("--moe-grouped-gemm" in message for message in built["warnings"])


def test_transformer_engine_asked_for_but_missing():
    from types import SimpleNamespace

    from mindspeed_dsa.features.dsa.repairs.feature import FEATURE

    (problem,) = FEATURE.problems(SimpleNamespace(transformer_impl="transformer_engine"))
    assert "--transformer-impl local" in problem
    assert not FEATURE.problems(SimpleNamespace(transformer_impl="local"))
