"""DSA on context parallel ranks has the gradients and losses of one rank."""

from __future__ import annotations

import pytest
import torch

from tests.features.dsa.cp_cases import in_order
from tests.matrix.make_indexer_reference import GLM
from tests.support.model import WITHOUT_EXPERTS, assert_same_gradients, put_together
from tests.support.pool import WorkerPool

CASES = "tests.features.dsa.cp_cases"
FUSED = {"use_fused_dsa": True}
PER_TOKEN = {"overrides": {"calculate_per_token_loss": True}, "ddp": {"average_in_collective": False}}
RECOMPUTE = {"recompute_granularity": "selective"}
SHARED, SERVED = {"dsa_indexer_topk_freq": 2}, {**FUSED, "dsa_indexer_loss_layers": "served"}
FORMS = {
    "sparse loss": {},
    "dense loss": {"overrides": {"dsa_indexer_use_sparse_loss": False}},
    "loss in backward": {"switches": {**FUSED, "dsa_fuse_kl_in_backward": True}},
    "no loss": {"overrides": {"dsa_indexer_loss_coeff": 0.0}},
    "blocks": {"switches": {**FUSED, "cp_block_rows": 1}},
    "kept": {"switches": {**FUSED, "cp_keep_gathered": True}},
    "by run": {"by_run": True},
    "loss in backward by run": {"switches": {**FUSED, "dsa_fuse_kl_in_backward": True}, "by_run": True},
    "all keys of a run": {"overrides": {"dsa_indexer_topk": 16}, "by_run": True},
    "shared by run": {"overrides": SHARED, "by_run": True},
    "served by run": {"switches": SERVED, "overrides": SHARED, "by_run": True},
    "served in backward by run": {
        "switches": {**SERVED, "dsa_fuse_kl_in_backward": True},
        "overrides": SHARED,
        "by_run": True,
    },
    "served by run, all keys": {
        "switches": SERVED,
        "overrides": {**SHARED, "dsa_indexer_use_sparse_loss": False},
        "by_run": True,
    },
    "recomputed": {"overrides": {**RECOMPUTE, "recompute_modules": ["core_attn", "mla_up_proj"]}},
    "recomputed projections": {"overrides": {**RECOMPUTE, "recompute_modules": ["mla_up_proj"]}},
    "all recomputed": {
        "overrides": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
    # topk 16 of 24 keys, with 12 rows per rank.
    "topk above the rows": {"overrides": {"dsa_indexer_topk": 16}},
    "all keys": {"overrides": {"dsa_indexer_topk": 24}},
    "GLM's indexer without ReLU": {"overrides": GLM | {"dsa_indexer_scoring_relu": False}},
    "warm-up": {"switches": {**FUSED, "dsa_stage": "warmup"}, "only": "core_attention.indexer"},
}


def step(
    pool: WorkerPool, cp: int, form: str = "sparse loss", per_token: bool = False, parts: int = 0, **more
):
    """Return the gradients, after checking that all replicas agree, and every rank's loss."""
    arguments = {"switches": FUSED, **FORMS[form], **more}
    case = "step"
    if parts:
        case, arguments["parts"] = "step_in_parts", parts
    if per_token:
        overrides = {**arguments.get("overrides", {}), **PER_TOKEN["overrides"]}
        arguments |= {**PER_TOKEN, "overrides": overrides}
    ranks = pool.run(f"{CASES}:{case}", arguments.pop("ranks", cp), cp=cp, **arguments)
    losses, tp = [rank["indexer loss"] for rank in ranks], more.get("tp", 1)
    # Tensor parallel ranks are neighbours; all other replicas are equal.
    whole, *copies = [put_together(ranks[first : first + tp]) for first in range(0, len(ranks), tp)]
    for copy in copies:
        assert all(copy[name].equal(gradient) for name, gradient in whole.items())
    return whole, losses


def same(result, expected) -> None:
    """Check gradients and losses; a parameter that does not learn must have exact zeros."""
    (gradients, losses), (whole, (loss,)) = result, expected
    learned = {name: gradient for name, gradient in whole.items() if gradient.any()}
    assert any("indexer" in name for name in learned) == (loss > 0)
    assert not any(gradients[name].any() for name in whole.keys() - learned.keys())
    assert_same_gradients({name: gradients[name] for name in learned}, learned, rtol=2e-5)
    assert losses == pytest.approx([loss] * len(losses), rel=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("sparse loss", marks=pytest.mark.full),
        "recomputed",
        "shared by run",
        "served by run",
        pytest.param("GLM's indexer without ReLU", marks=pytest.mark.full),
    ],
)
def test_two_ranks_have_the_gradients_and_the_loss_of_one(pool, form):
    same(step(pool, 2, form), step(pool, 1, form))


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ("by run", 2),
        pytest.param("recomputed", 1, marks=pytest.mark.full),
        pytest.param("recomputed projections", 2, marks=pytest.mark.full),
        *(
            pytest.param(form, 2, marks=pytest.mark.full)
            for form in (
                "sparse loss",
                "kept",
                "loss in backward by run",
                "all recomputed",
                "all keys",
                "warm-up",
            )
        ),
    ],
)
def test_queries_and_keys_in_two_parts(pool, form, parts):
    """A recomputed core attention gets the key in one part, gathered before recomputation."""
    same(step(pool, 2, form, parts=parts), step(pool, 1, form))


@pytest.mark.full
def test_two_parts_beside_tensor_and_sequence_parallel_ranks(pool):
    arguments = {"form": "topk above the rows", "per_token": True}
    same(step(pool, 2, ranks=4, tp=2, parts=2, **arguments), step(pool, 1, **arguments))


def test_beside_tensor_and_sequence_parallel_ranks(pool):
    """The indexer's key and weights come from a rank's own rows, its query from the rows of all ranks."""
    arguments = {"form": "topk above the rows", "per_token": True}
    same(step(pool, 2, ranks=4, tp=2, **arguments), step(pool, 1, **arguments))


@pytest.mark.parametrize("cp", [1, 2])
def test_weights_are_read_after_the_hooks_that_wait_for_them(pool, cp):
    # A norm held by the layer is one of these weights. Read too early, it had the previous step's value.
    for there, late in pool.run(f"{CASES}:losses_of_late_weights", cp, cp=cp, builder="tests.support.model"):
        assert late.equal(there)


def test_blocks_of_rows_beside_overlapped_reduction_of_three_ranks(pool):
    # Overlapped reduction only ends if every parameter has a gradient.
    blocks = {"switches": {**FUSED, "cp_block_rows": 2}, "ddp": {"overlap_grad_reduce": True}}
    same(step(pool, 3, "no loss", **blocks), step(pool, 1, "no loss"))


LATENT, INDEX = 24, 16
"""Widths of the main keys and of the indexer's keys."""


@pytest.mark.parametrize("keeps", [False, True])
def test_projections_hide_what_is_gathered_in_both_directions(pool, keeps):
    for events in pool.run(f"{CASES}:order_of_a_layer", 2, cp_keep_gathered=keeps):
        assert events[:7] == [
            f"key {LATENT} starts",
            "linear_q_up_proj",
            f"key {INDEX} starts",
            "linear_wq_b",
            f"key {LATENT} is needed",
            f"key {INDEX} is needed",
            "linear_proj",
        ]
        again = [f"key {width} starts again" for width in (LATENT, INDEX)]
        assert [event for event in events[7:] if "again" in event] == ([] if keeps else again)
        if not keeps:
            assert events.index(again[-1]) < events.index("linear_proj backward")
        for width, projection in ((INDEX, "linear_wq_b"), (LATENT, "linear_q_up_proj")):
            started, needed = (events.index(f"gradient {width} {what}") for what in ("starts", "is needed"))
            assert started < events.index(f"{projection} backward") < needed


@pytest.mark.parametrize("by_run", [False, pytest.param(True, marks=pytest.mark.full)])
def test_gradients_of_narrow_keys_are_added_up_in_fp32(pool, by_run):
    """Gradients that operators compute in fp32 are summed before they are rounded."""
    for dtypes in pool.run(f"{CASES}:dtypes_of_parts", 2, by_run=by_run):
        assert dtypes == ["torch.float32"] * 2


@pytest.mark.full
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_in_every_form(pool, form, per_token):
    same(step(pool, 2, form, per_token), step(pool, 1, form, per_token))


@pytest.mark.full
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("form", ["sparse loss", "warm-up", "blocks"])
@pytest.mark.parametrize("cp", [3, 4])
def test_more_ranks_have_the_gradients_and_the_loss_of_one(pool, cp, form, per_token):
    same(step(pool, cp, form, per_token), step(pool, 1, form, per_token))


@pytest.mark.full
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
def test_beside_data_parallel_ranks(pool, per_token):
    result = step(pool, 2, per_token=per_token, ranks=4)
    expected, losses = step(pool, 1, per_token=per_token, ranks=2)
    same(result, (expected, losses[:1]))


@pytest.mark.full
@pytest.mark.parametrize("form", ["sparse loss", "loss in backward", "warm-up", "no loss", "recomputed"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
def test_every_form_beside_tensor_parallel_ranks(pool, form, sequence_parallel, cp):
    if not sequence_parallel:
        # With tensor parallelism, experts need sequence parallelism.
        overrides = {**FORMS[form].get("overrides", {}), **WITHOUT_EXPERTS}
        arguments = {"overrides": overrides}
    else:
        arguments = {}
    result = step(pool, cp, form, True, ranks=2 * cp, tp=2, sequence_parallel=sequence_parallel, **arguments)
    same(result, step(pool, 1, form, True, **arguments))


@pytest.mark.parametrize("rope_type", [pytest.param("rope", marks=pytest.mark.full), "yarn"])
@pytest.mark.parametrize("case", ["rotated", "backport_indexer"])
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_rows_are_rotated_by_their_positions_in_the_whole_sequence(pool, case, rope_type, cp):
    (whole,) = pool.run(f"{CASES}:{case}", 1, cp=1, rope_type=rope_type)
    ranks = pool.run(f"{CASES}:{case}", cp, cp=cp, rope_type=rope_type)
    assert [rank["rows"].shape[0] for rank in ranks] == [24 // cp] * cp
    torch.testing.assert_close(in_order(ranks), whole["rows"], rtol=1e-6, atol=1e-6)


def test_what_would_be_silently_wrong_is_refused(pool):
    for switches, message in (
        (
            {"use_dsa_absorb": False},
            "12 queries came with 12 keys by head on one of 2 context parallel ranks, which share keys",
        ),
        ({"use_fused_lightning_indexer": False}, "omit --no-use-fused-..."),
    ):
        case = {"case": f"{CASES}:step", "cp": 2, "switches": {**FUSED, **switches}}
        errors = pool.run("tests.support.model:error_of", 2, **case)
        assert all(message in error for error in errors), errors
