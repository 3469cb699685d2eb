"""DSA in real training on Megatron-core releases that have none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.features.dsa.cp_cases import in_order
from tests.matrix.make_reference import CASES, FILE, summary
from tests.support.model import assert_same_gradients, put_together

pytestmark = pytest.mark.releases(">=0.12.1,<0.16")

ROOT = Path(__file__).parents[2]
STEP = "tests.matrix.model:one_step"
CASE = "tests.matrix.backport_steps"
PACKS = "tests.features.attention.packs.documents"


@pytest.fixture(scope="module")
def plain(pool):
    (result,) = pool.run(STEP, 1, num_microbatches=2)
    return result


def same(result, expected, rtol=1e-4):
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["indexer loss"] == pytest.approx(expected["indexer loss"], rel=1e-4)
    assert_same_gradients(result["gradients"], expected["gradients"], rtol)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("absorb", [False, True, None])
def test_the_values_of_0_16_1(pool, name, absorb):
    expected = json.loads(FILE.read_text())["cases"][name]
    switches = {} if absorb is None else {"use_dsa_absorb": absorb}
    (step,) = pool.run(STEP, 1, switches=switches, overrides=CASES[name], num_microbatches=2)
    actual = summary(step)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["indexer loss"] == pytest.approx(expected["indexer loss"], rel=1e-4)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for parameter, (norm, product) in expected["gradients"].items():
        assert actual["gradients"][parameter] == pytest.approx([norm, product], rel=1e-3, abs=1e-4 * norm), (
            parameter
        )


def test_parameters_have_the_names_of_later_releases(plain):
    indexer = "decoder.layers.1.self_attention.core_attention.indexer"
    expected = {
        f"{indexer}.{name}"
        for name in (
            "linear_wq_b.weight",
            "linear_wk.weight",
            "k_norm.weight",
            "k_norm.bias",
            "linear_weights_proj.weight",
        )
    }
    assert {name for name in plain["gradients"] if name.startswith(indexer)} == expected


def test_it_learns_with_experts_and_absorbed_is_the_same(pool):
    (plain,) = pool.run(f"{CASE}:learn", 1, steps=12)
    (absorbed,) = pool.run(f"{CASE}:learn", 1, steps=12, switches={"use_dsa_absorb": True})
    assert plain["losses"][-1] < 0.6 * plain["losses"][0]
    assert plain["indexer"][-1] < plain["indexer"][0]
    assert absorbed["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert absorbed["indexer"] == pytest.approx(plain["indexer"], rel=1e-3)


@pytest.mark.parametrize("absorb", [False, True])
def test_tensor_and_sequence_parallel(pool, plain, absorb):
    ranks = pool.run(STEP, 2, tp=2, switches={"use_dsa_absorb": absorb}, num_microbatches=2)
    same({**ranks[0], "gradients": put_together(ranks)}, plain)
    assert ranks[1]["losses"] == ranks[0]["losses"]


@pytest.mark.parametrize("absorb", [False, True])
def test_tensor_parallel_without_sequence_parallel(pool, plain, absorb):
    ranks = pool.run(
        STEP, 2, tp=2, sequence_parallel=False, switches={"use_dsa_absorb": absorb}, num_microbatches=2
    )
    same({**ranks[0], "gradients": put_together(ranks)}, plain)


def test_copies_of_the_indexer_get_the_mean_of_their_gradients(pool):
    for gradients in pool.run(f"{CASE}:finalized_indexer_gradients", 2):
        assert len(gradients) == 20
        assert set(gradients) == {1.5}


def test_pipeline_parallel(pool, plain):
    ranks = pool.run(STEP, 2, pp=2, num_microbatches=2)
    same({**ranks[1], "gradients": put_together(ranks)}, plain)
    assert ranks[0]["indexer loss"] == ranks[1]["indexer loss"]


def test_interleaved_pipeline(pool):
    (expected,) = pool.run(STEP, 1, num_microbatches=2, overrides={"num_layers": 4})
    ranks = pool.run(STEP, 2, pp=2, vpp=2, num_microbatches=2, overrides={"num_layers": 4})
    same({**ranks[1], "gradients": put_together(ranks)}, expected)


def test_data_parallel(pool, plain):
    ranks = pool.run(STEP, 2, num_microbatches=1)
    assert ranks[0]["gradients"].keys() == ranks[1]["gradients"].keys()
    # Two ranks with one microbatch each average the same values as one rank with two.
    assert_same_gradients(ranks[0]["gradients"], plain["gradients"])


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=["core_attn", "mla_up_proj", "both", "full"],
)
@pytest.mark.parametrize("absorb", [False, True])
def test_recomputation_changes_nothing(pool, recompute, absorb):
    switches = {"use_dsa_absorb": absorb}
    (expected,) = pool.run(STEP, 1, switches=switches, num_microbatches=2)
    (result,) = pool.run(STEP, 1, switches=switches, overrides=recompute, num_microbatches=2)
    assert result["losses"] == expected["losses"]
    assert result["indexer loss"] == pytest.approx(expected["indexer loss"], rel=1e-6)
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-6, atol=1e-8, msg=name)


IN_BACKWARD = {"use_fused_dsa": True, "dsa_fuse_kl_in_backward": True}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"overrides": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}},
        {"grad_scale": 128.0},
        {"tp": 2},
    ],
    ids=str,
)
def test_the_loss_in_backward_is_the_ordinary_one(pool, arguments):
    ranks = arguments.get("tp", 1)
    ours, theirs = (
        pool.run(STEP, ranks, switches=switches, num_microbatches=2, **arguments)
        for switches in (IN_BACKWARD, {"use_fused_dsa": True})
    )
    for actual, expected in zip(ours, theirs, strict=True):
        same(actual, expected)


def test_the_loss_in_backward_runs_there_and_nowhere_else(pool):
    (counts,) = pool.run(f"{CASE}:loss_calls", 1, switches=IN_BACKWARD)
    assert counts == {"sparse_loss": 0, "divergence_and_score_gradient in forward": 0, "and in all": 2}


@pytest.mark.parametrize("module", ["core_attn", "full"])
def test_recomputation_runs_the_selection_twice_and_its_loss_once(pool, module):
    (counts,) = pool.run(f"{CASE}:calls", 1, recompute=module)
    assert counts == {"lightning_indexer": 4, "sparse_loss": 2}


def test_the_indexer_loss_weighs_the_same_whatever_the_microbatches(pool, plain):
    (result,) = pool.run(STEP, 1, num_microbatches=8, micro_batch_size=1)
    assert_same_gradients(result["gradients"], plain["gradients"])
    (scaled,) = pool.run(STEP, 1, num_microbatches=2, grad_scale=128.0)
    # The job's loss is not multiplied by the scale, so only Megatron's own scaling shows.
    indexer = {name: 128 * gradient for name, gradient in plain["gradients"].items() if "indexer" in name}
    assert_same_gradients({name: scaled["gradients"][name] for name in indexer}, indexer)


@pytest.mark.parametrize("switches", [{}, IN_BACKWARD], ids=["ordinary", "in backward"])
def test_per_token_loss_counts_the_indexer_loss_by_tokens_as_well(pool, plain, switches):
    (result,) = pool.run(f"{CASE}:per_token_gradients", 1, switches=switches)
    assert_same_gradients(result, plain["gradients"])


def test_each_loss_trains_its_own_parameters(pool):
    (results,) = pool.run(f"{CASE}:gradients_of_each_loss", 1)
    for name, (of_model, of_indexer) in results.items():
        assert (of_indexer > 0) == ("indexer" in name), name
        assert (of_model > 0) == ("indexer" not in name), name


@pytest.mark.parametrize("mode", ["coefficient 0", "no coefficient", "evaluation", "no_grad"])
def test_no_loss_work_without_a_loss(pool, mode):
    (result,) = pool.run(f"{CASE}:without_loss", 1, mode=mode)
    assert result["losses computed"] == 0
    assert result["graphs of scores"] == 0
    assert result["tracked"] is None
    if "coefficient" in mode:
        assert result["indexer gradients"] == [True] * 10  # present, and all zeros


def test_a_checkpoint_comes_back_in_another_layout(pool, tmp_path):
    folder = str(tmp_path / "checkpoint")
    (tmp_path / "checkpoint").mkdir()
    pool.run(f"{CASE}:save", 2, folder=folder, tp=2)
    (restored,) = pool.run(f"{CASE}:load", 1, folder=folder)
    assert restored["keys"] > 10
    assert restored["different"] == []
    assert restored["loss"] == pytest.approx(restored["expected loss"], rel=1e-5)


def test_in_bfloat16_it_learns_as_well(pool):
    (result,) = pool.run(f"{CASE}:learn", 1, steps=12, switches={"use_dsa_absorb": True}, bf16=True)
    assert result["losses"][-1] < 0.7 * result["losses"][0]
    assert result["indexer"][-1] < result["indexer"][0]


def test_mtp_layers_have_an_indexer_of_their_own(pool):
    (result,) = pool.run(f"{CASE}:mtp_step", 1)
    assert result["reported"] == [1, 1, 1]  # two layers of the decoder, one of MTP
    assert all(result["trained"])
    assert len(result["trained"]) == 15


@pytest.mark.parametrize("coefficient", [None, 1.0])
def test_overlapped_reduction_completes_with_and_without_a_loss(pool, plain, coefficient):
    ranks = pool.run(f"{CASE}:overlapped", 2, coefficient=coefficient)
    if coefficient:
        assert_same_gradients(ranks[0], plain["gradients"])
    indexer = [gradient for name, gradient in ranks[0].items() if "indexer" in name]
    assert len(indexer) == 10
    assert all(bool(gradient.any()) == bool(coefficient) for gradient in indexer)


def test_a_plain_mla_model_is_left_alone(pool):
    (error,) = pool.run(f"{CASE}:without_variant", 1)
    assert (
        "k_channels" in error
    )  # stock Megatron's own limit on local modules: MLA got its own core attention


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dsa_indexer_topk": None}, "DSA needs dsa_indexer_topk"),
        ({"experimental_attention_variant": "other"}, "is not known to this Megatron"),
        ({"dsa_indexer_head_dim": 4}, "has no room"),
    ],
)
def test_what_cannot_be_built_is_refused(pool, overrides, message):
    (error,) = pool.run("tests.support.model:error_of", 1, case=STEP, overrides=overrides)
    assert message in error


@pytest.mark.parametrize("switch", ["dsa_indexer_rope_first", "dsa_indexer_normalised_query"])
def test_deepseeks_layout_can_be_chosen(pool, plain, switch):
    (result,) = pool.run(STEP, 1, switches={switch: True}, num_microbatches=2)
    assert result["indexer loss"] != pytest.approx(plain["indexer loss"], rel=1e-3)
    (again,) = pool.run(f"{CASE}:indexer_input", 1, switches={switch: True})
    assert again["normalised"] == (switch == "dsa_indexer_normalised_query")


def test_everything_is_undone(pool):
    (left,) = pool.run(f"{CASE}:still_changed_after_disable", 1)
    assert left == []


def test_configurations_know_the_fields(pool):
    (result,) = pool.run(f"{CASE}:fields", 1)
    assert result["known"] == [True, True]
    assert result["copied"] == ("dsa", 6, 0.5, True)
    assert result["derived"] == ("dsa", 9)
    assert result["plain"] == (None, None, False)


def test_flags_are_added_where_the_parser_lacks_them(pool):
    (result,) = pool.run(f"{CASE}:flags", 1)
    assert result["values"] == {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 4,
        "dsa_indexer_head_dim": 16,
        "dsa_indexer_topk": 7,
        "dsa_indexer_loss_coeff": 0.5,
        "dsa_indexer_use_sparse_loss": True,
        "mine": "kept",
    }
    assert result["twice"] is True


@pytest.mark.parametrize("absorb", [True, False])
def test_a_pack_trains_as_its_documents_one_by_one(pool, absorb):
    arguments = {"builder": "tests.matrix.model", "switches": {"use_dsa_absorb": absorb}}
    (packed,), (alone,) = (
        pool.run(f"{PACKS}:one_pass", 1, packed=each, **arguments) for each in (True, False)
    )
    torch.testing.assert_close(packed["losses"], alone["losses"], rtol=1e-5, atol=1e-5)
    assert packed["indexer loss"] == pytest.approx(alone["indexer loss"], rel=1e-5)
    assert_same_gradients(packed["gradients"], alone["gradients"], 1e-5)


def test_a_script_that_knows_no_packs_trains_on_them(pool):
    arguments = {"builder": "tests.matrix.model"}
    (alone,) = pool.run(f"{PACKS}:scripted_step", 1, alone=True, **arguments)
    packed = pool.run(f"{PACKS}:scripted_step", 4, tp=2, pp=2, **arguments)
    assert_same_gradients(put_together(packed), alone["gradients"], 2e-5)
    if metadata.version("megatron-core").startswith("0.12."):
        return  # its loss functions sum tokens over context parallel ranks themselves
    for rank in pool.run(f"{PACKS}:scripted_step", 2, cp=2, **arguments):
        assert_same_gradients(rank["gradients"], alone["gradients"], 2e-5)


@pytest.mark.parametrize("parts", ["", "_in_parts"], ids=["whole", "in parts"])
@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_have_the_gradients_of_one(pool, cp, parts):
    (expected,) = pool.run(f"{CASE}:context_parallel_step", 1, cp=1)
    for rank in pool.run(f"{CASE}:context_parallel_step{parts}", cp, cp=cp):
        assert_same_gradients(rank["gradients"], expected["gradients"])
        assert rank["indexer loss"] == pytest.approx(expected["indexer loss"], rel=1e-5)


@pytest.mark.parametrize("cp", [1, 2])
def test_weights_are_read_after_the_hooks_that_wait_for_them(pool, cp):
    case = "tests.features.dsa.cp_cases:losses_of_late_weights"
    switches = {"dsa_indexer_normalised_query": True}
    for there, late in pool.run(case, cp, cp=cp, builder="tests.matrix.model", **switches):
        assert late.equal(there)


@pytest.mark.parametrize("rope_type", ["rope", "yarn"])
def test_index_rows_are_rotated_by_their_positions_in_the_whole_sequence(pool, rope_type):
    (whole,) = pool.run(f"{CASE}:context_parallel_indexer", 1, cp=1, rope_type=rope_type)
    ranks = pool.run(f"{CASE}:context_parallel_indexer", 2, cp=2, rope_type=rope_type)
    torch.testing.assert_close(in_order(ranks), whole["rows"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "switches", [["--use-fused-dsa"], ["--dsa-backport", "--no-use-fused-dsa"]], ids=["fused", "plain"]
)
def test_the_example_job_trains(tmp_path, switches):
    command = [
        sys.executable,
        str(ROOT / "examples/pretrain_dsa.py"),
        "--train-iters",
        "6",
        "--no-save",
    ]
    done = subprocess.run(
        [*command, *switches, "--output-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = (line for line in done.stdout.splitlines() if "lm loss" in line)
    assert _figure(last, "lm loss") < _figure(first, "lm loss") - 1
    assert _figure(last, "indexer loss") > 0


def _figure(line: str, name: str) -> float:
    return float(line.partition(f"{name} ")[2].split()[0])
