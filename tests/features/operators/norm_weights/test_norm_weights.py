"""Norm weights in fp32: selection, computation, updates equal to Megatron's fp32 masters, checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa import features
from tests.features.operators.norm_weights.fp32_norms import FLAG, is_of_a_norm
from tests.support.optimizer_training import COMPARED, DISTRIBUTED, JOB, OFF, PLAIN
from tests.support.pool import CaseError

WORKERS = "tests.features.operators.norm_weights.fp32_norms"
FSDP2 = "tests.features.data_parallel.fsdp2.beside_ddp:life"
STATE = ("weights", "masters", "moments")
FULL = pytest.mark.full
FEATURE = next(each for each in features.built_in() if each.name == "init-norm-weight-in-fp32")


# -- selection and computation ------------------------------------------------------------------


def test_all_norms_and_nothing_else(pool):
    (types,) = pool.run(f"{WORKERS}:types_with_multi_token_prediction", 1, switches=FLAG)
    assert {name for name, dtype in types.items() if dtype is torch.float32} == set(
        filter(is_of_a_norm, types)
    )
    for part in (
        "mtp.layers.0.enorm.",
        "mtp.layers.0.hnorm.",
        "mtp.layers.0.final_layernorm.",
        "decoder.final_layernorm.",
        "input_layernorm.",
        "pre_mlp_layernorm.",
        "indexer.k_norm.weight",
        "indexer.k_norm.bias",
        "linear_q_up_proj.layer_norm_weight",
        "linear_kv_up_proj.layer_norm_weight",
    ):
        assert any(part in name for name in types), part
    (stock,) = pool.run(f"{WORKERS}:types_with_multi_token_prediction", 1, switches=OFF)
    assert set(stock.values()) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("fused", "normalization", "held"),
    [
        (False, "RMSNorm", False),
        (True, "RMSNorm", False),
        pytest.param(False, "RMSNorm", True, marks=FULL),
        pytest.param(True, "RMSNorm", True, marks=FULL),
        (False, "LayerNorm", False),
        pytest.param(False, "LayerNorm", True, marks=FULL),
    ],
)
def test_a_norm_of_bf16_rows_is_the_formula_in_fp64_rounded_once(pool, fused, normalization, held):
    (result,) = pool.run(
        f"{WORKERS}:output_and_gradients", 1, fused=fused, normalization=normalization, held=held
    )
    assert result["weight"].dtype == result["weight gradient"].dtype == torch.float32
    assert not result["weight"].equal(result["weight"].bfloat16().float())
    hidden = result["hidden"].double().requires_grad_()
    weight = result["weight"].double().requires_grad_()
    centred = hidden - hidden.mean(-1, keepdim=True) if normalization == "LayerNorm" else hidden
    expected = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    expected = expected + result.get("bias", torch.zeros(())).double()
    expected.backward(result["arriving"].double())
    for name, reference in (("output", expected.detach()), ("hidden gradient", hidden.grad)):
        assert result[name].dtype == torch.bfloat16
        # Half a unit of the last of eight bf16 places, plus fp32's rounding.
        torch.testing.assert_close(result[name].double(), reference, rtol=2**-8 * 1.001, atol=1e-6)
    torch.testing.assert_close(result["weight gradient"].double(), weight.grad, rtol=1e-5, atol=1e-5)


def test_a_norm_that_takes_one_type_gets_one(pool):
    (found,) = pool.run(f"{WORKERS}:converted", 1, kind="apex")
    assert found == {"weight": torch.float32, "output": torch.bfloat16, "class": "ApexNorm"}


def test_a_linear_layer_with_a_norm_that_is_not_ours_is_refused(pool):
    (said,) = pool.run("tests.support.model:error_of", 1, case=f"{WORKERS}:converted", kind="linear")
    assert "TransformerEnginesLinear holds a norm" in said
    assert "--init-norm-weight-in-fp32" in said
    assert "--transformer-impl local" in said


# -- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        pytest.param(PLAIN, "bf16", marks=pytest.mark.full),
        (DISTRIBUTED, "bf16"),
        pytest.param(PLAIN, "fp16", marks=FULL),
        pytest.param(DISTRIBUTED, "fp16", marks=FULL),
    ],
)
def test_updates_are_those_of_megatrons_masters(pool, options, precision):
    """From equal gradients, fp32 norm weights equal stock's fp32 masters; stock's model weights are
    rounded.
    """
    arguments = {"drawn": True, "clip": 0.0, "precision": precision, **options}
    (stock,) = pool.run(f"{WORKERS}:from_equal_weights", 1, switches=OFF, **arguments)
    (ours,) = pool.run(f"{WORKERS}:from_equal_weights", 1, switches=FLAG, **arguments)
    assert ours["weights"].keys() == stock["weights"].keys()
    for name, weight in ours["weights"].items():
        assert weight.dtype == torch.float32
        assert weight.flatten().equal(stock["masters"][name].flatten()), name
        assert weight.flatten().equal(ours["masters"][name].flatten()), name
        assert not weight.equal(stock["weights"][name].float()), name


@pytest.mark.parametrize("options", [PLAIN, pytest.param(DISTRIBUTED, marks=FULL)])
def test_small_updates_arrive(pool, options):
    """Weights start at one, so first losses agree; bf16 cannot hold such small updates of one."""
    arguments = {"ones": True, "steps": 3, "optimizer_options": {"lr": 1e-4, "weight_decay": 0.0}, **options}
    (stock,) = pool.run(f"{WORKERS}:from_equal_weights", 1, switches=OFF, **arguments)
    (ours,) = pool.run(f"{WORKERS}:from_equal_weights", 1, switches=FLAG, **arguments)
    for name, weight in ours["weights"].items():
        assert bool((weight != 1).all()), name
        assert bool((weight - 1).abs().max() < 2**-9), name
        assert bool((stock["weights"][name] == 1).all()), name
        assert bool((stock["masters"][name] != 1).any()), name
    assert ours["records"][0]["loss"] == stock["records"][0]["loss"]
    # Weights, and so gradient norms, differ from the second step on, by an amount that depends on the CPU.
    assert ours["records"][0]["norm"] == pytest.approx(stock["records"][0]["norm"], rel=2**-5)
    for having, without in zip(ours["records"], stock["records"], strict=True):
        assert having["loss"] == pytest.approx(without["loss"], rel=2**-8)


@pytest.mark.full
@pytest.mark.parametrize(
    ("feature", "options"),
    [
        ({"swap_optimizer": True}, DISTRIBUTED),
        pytest.param({"swap_optimizer": True}, PLAIN, marks=FULL),
        pytest.param({"reuse_fp32_param": True}, DISTRIBUTED, marks=FULL),
        pytest.param({"reuse_fp32_param": True}, PLAIN, marks=FULL),
        pytest.param({"virtual_optimizer": ["all"]}, DISTRIBUTED, marks=FULL),
        pytest.param({"virtual_optimizer": ["all"]}, PLAIN, marks=FULL),
    ],
)
def test_beside_what_moves_optimizer_state(pool, feature, options):
    """Ten steps, one of them skipped, are bit-identical."""
    (alone,) = pool.baseline(f"{JOB}:train", 1, switches=FLAG, skip=5, **options)
    (both,) = pool.run(f"{JOB}:train", 1, switches={**FLAG, **feature}, skip=5, **options)
    for what in COMPARED:
        assert both[what] == alone[what], what


# -- checkpoints -------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "way"),
    [
        (DISTRIBUTED, "fully_reshardable"),
        pytest.param(PLAIN, "torch_dist", marks=FULL),
        pytest.param(PLAIN, "torch", marks=FULL),
    ],
)
@pytest.mark.parametrize(
    ("saved_with", "between"),
    [(FLAG, OFF), pytest.param(OFF, FLAG, marks=FULL)],
    ids=["through a job without", "through a job with it"],
)
def test_checkpoints_go_from_one_job_to_the_other_and_back(pool, tmp_path, options, way, saved_with, between):
    """Every weight, master and moment is restored on every rank, and training continues as if unbroken."""
    whole = pool.baseline(f"{JOB}:train", 2, steps=5, switches=saved_with, **options)
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    for folder in (one, other):
        (tmp_path / folder).mkdir()
    at_save = pool.run(f"{JOB}:train", 2, steps=3, save=(way, one), switches=saved_with, **options)
    pool.run(f"{JOB}:train", 2, steps=0, load=(way, one), save=(way, other), switches=between, **options)
    resumed = pool.run(f"{JOB}:train", 2, steps=2, first=3, load=(way, other), switches=saved_with, **options)
    for result, before, expected in zip(resumed, at_save, whole, strict=True):
        for what in STATE:
            assert result["loaded"][what] == before[what], f"{what} as saved"
            assert result[what] == expected[what], f"{what} as without a break"
        assert result["records"] == expected["records"][3:]


BY_BUCKETS = ("torch", "dp_reshardable", "dp_zero_gather_scatter")


@FULL
@pytest.mark.parametrize("way", BY_BUCKETS)
def test_resumed_from_formats_of_buckets(pool, tmp_path, way):
    options = {"switches": FLAG, **DISTRIBUTED}
    whole = pool.baseline(f"{JOB}:train", 2, steps=5, **options)
    pool.run(f"{JOB}:train", 2, steps=3, save=(way, str(tmp_path)), **options)
    resumed = pool.run(f"{JOB}:train", 2, steps=2, first=3, load=(way, str(tmp_path)), **options)
    for result, expected in zip(resumed, whole, strict=True):
        assert all(result[what] == expected[what] for what in STATE)
        assert result["records"] == expected["records"][3:]


@FULL
@pytest.mark.parametrize("way", BY_BUCKETS)
@pytest.mark.parametrize(("saved_with", "loaded_with"), [(FLAG, OFF), (OFF, FLAG)])
def test_formats_of_buckets_are_not_read_into_other_buckets(pool, tmp_path, way, saved_with, loaded_with):
    # Megatron compares buffer sizes, and stops.
    pool.run(f"{JOB}:train", 1, steps=1, save=(way, str(tmp_path)), switches=saved_with, **DISTRIBUTED)
    load = {"load": (way, str(tmp_path)), "switches": loaded_with, **DISTRIBUTED}
    with pytest.raises(CaseError, match=r"Number of unpadded elements|Global shape mismatch"):
        pool.run(f"{JOB}:train", 1, steps=1, **load)


@FULL
def test_fsdp2_trains_as_ddp_and_reads_its_checkpoints(pool, tmp_path):
    """Norm weights are replicated next to 16-bit shards."""
    for rank in pool.run(FSDP2, 2, folder=str(tmp_path), sharding_size=None, **FLAG):
        for with_ddp, sharded in rank["records"]:
            assert sharded["loss"] == pytest.approx(with_ddp["loss"], rel=2e-3)
        first, ours = (record["norm"] for record in rank["records"][0])
        assert ours == pytest.approx(first, rel=1e-6)
        assert rank["unequal"] == {"ddp to fsdp2": [], "fsdp2 to ddp": [], "resumed": []}


# -- refusals ----------------------------------------------------------------------------------


def problems(**given):
    args = SimpleNamespace(**{"bf16": True, "fp16": False, "transformer_impl": "local", **given})
    return FEATURE.problems(args)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"bf16": False}, "--bf16"),
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl transformer_engine"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_custom_fsdp": True}, "--use-custom-fsdp"),
        ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
        ({"use_layer_wise_distributed_optimizer": True}, "--use-layer-wise-distributed-optimizer"),
        ({"optimizer": "muon"}, "--optimizer muon"),
    ],
)
def test_one_message_names_both(given, named):
    (said,) = problems(**given)
    assert "--init-norm-weight-in-fp32" in said
    assert named in said


def test_what_goes_together_is_not_refused():
    assert not problems()
    assert not problems(bf16=False, fp16=True, optimizer="sgd", use_torch_fsdp2=True)
