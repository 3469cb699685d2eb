"""Latent attention sharded by rows, heads and rows again: the same training and the same checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.attention.sp_tp_sp.feature import check_sp_tp_sp
from tests.features.attention.context_parallel import dense_model
from tests.support import model as job

CASES = "tests.features.attention.sp_tp_sp.rows_and_heads"


@pytest.fixture(scope="module")
def one_rank(pool):
    (result,) = pool.run("tests.features.attention.context_parallel.dense_model:step", 1, attention="latent")
    return result


def check(pool, one_rank, cp=1, **arguments):
    tp = arguments["tp"]
    ranks = pool.run(f"{CASES}:facts", tp * cp, cp=cp, **arguments)
    found = dense_model.in_one_group(ranks, cp, tp)
    torch.testing.assert_close(found["losses"], one_rank["losses"], rtol=1e-5, atol=0)
    job.assert_same_gradients(found["gradients"], one_rank["gradients"], rtol=1e-5)
    for rank in ranks:
        # Full weights on every rank: [hidden, heads x value] and the down-projections.
        assert rank["shapes"]["linear_proj.weight"] == (32, 8 * 8)
        assert rank["shapes"]["linear_q_down_proj.weight"] == (24, 32)
        assert rank["shapes"]["linear_kv_down_proj.weight"] == (16 + 8, 32)
        # In each of two layers and two microbatches: all rows of the rank's heads.
        assert rank["received"] == [(dense_model.SEQUENCE // cp, 2, 8 * 8 // tp)] * 4
    return ranks


def test_same_step_as_on_one_rank(pool, one_rank):
    check(pool, one_rank, tp=2, ddp={"overlap_grad_reduce": True, "bucket_size": 2000})


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [{"tp": 4}, {"tp": 2, "cp": 2}, {"tp": 2, "cp": 2, "algorithm": "ulysses_cp_algo"}], ids=str
)
def test_same_step_in_other_layouts(pool, one_rank, layout):
    check(pool, one_rank, **layout)


@pytest.mark.parametrize(
    ("on_saving", "on_loading"), [(True, False), pytest.param(False, True, marks=pytest.mark.full)]
)
def test_checkpoints_are_megatrons(pool, tmp_path, on_saving, on_loading):
    """Checkpoints saved with the feature load without it, and the other way round."""
    for result in pool.run(
        f"{CASES}:checkpoint", 2, folder=str(tmp_path / "one"), on_saving=on_saving, on_loading=on_loading
    ):
        assert result["equal"]
        assert result["size"] > 1


def test_what_it_needs_has_a_name():
    good = {
        "multi_latent_attention": True,
        "transformer_impl": "local",
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "ckpt_format": "torch_dist",
    }
    assert not check_sp_tp_sp(SimpleNamespace(**good), None)
    for changed, message in (
        ({"multi_latent_attention": False}, "for latent attention"),
        ({"experimental_attention_variant": "dsa"}, "with DSA use --context-parallel-size"),
        ({"transformer_impl": "transformer_engine"}, "add --transformer-impl local"),
        ({"tensor_model_parallel_size": 1}, "at least 2"),
        ({"sequence_parallel": False}, "add --sequence-parallel"),
        ({"ckpt_format": "torch"}, "use --ckpt-format torch_dist"),
        ({"fp8": "hybrid"}, "omit --fp8-format"),
    ):
        (problem,) = check_sp_tp_sp(SimpleNamespace(**{**good, **changed}), None)
        assert message in problem
