from __future__ import annotations

import pytest
import torch

from tests.support.model import assert_same_gradients, put_together
from tests.support.pool import WorkerPool

RUN = "tests.support.model:run"
INDEXER = "core_attention.indexer"


def indexer_gradients(pool: WorkerPool, world_size: int = 1, **arguments):
    return put_together(pool.run(RUN, world_size, only=INDEXER, **arguments))


@pytest.fixture(scope="module")
def one_microbatch(pool: WorkerPool):
    return indexer_gradients(pool, num_microbatches=1, micro_batch_size=4)


def ratio(actual, expected) -> float:
    """Return the common factor between two sets of gradients."""
    left = torch.cat([actual[name].flatten() for name in expected])
    right = torch.cat([gradient.flatten() for gradient in expected.values()])
    factor = float((left @ right) / (right @ right))
    assert torch.nn.functional.cosine_similarity(left, right, dim=0) > 0.99999
    return factor


@pytest.mark.full
def test_microbatches_do_not_change_the_indexers_gradient(pool, one_microbatch):
    assert_same_gradients(indexer_gradients(pool, num_microbatches=4, micro_batch_size=1), one_microbatch)


def test_without_the_repair_the_gradient_grows_with_the_microbatches(pool, one_microbatch):
    unscaled = indexer_gradients(
        pool, switches={"no_dsa_repairs": "loss-scale"}, num_microbatches=4, micro_batch_size=1
    )
    assert ratio(unscaled, one_microbatch) == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_per_token_loss(pool, one_microbatch, num_microbatches):
    gradients = indexer_gradients(
        pool,
        num_microbatches=num_microbatches,
        micro_batch_size=4 // num_microbatches,
        overrides={"calculate_per_token_loss": True},
        ddp={"average_in_collective": False},
    )
    assert_same_gradients(gradients, one_microbatch)


def test_a_grad_scaler_multiplies_the_indexers_gradient_too(pool, one_microbatch):
    scaled = indexer_gradients(pool, num_microbatches=4, micro_batch_size=1, grad_scale=128.0)
    assert ratio(scaled, one_microbatch) == pytest.approx(128, rel=1e-4)


def test_data_parallel_ranks_average(pool, one_microbatch):
    assert_same_gradients(indexer_gradients(pool, 2, num_microbatches=1, micro_batch_size=2), one_microbatch)


@pytest.mark.parametrize(
    "layout",
    [pytest.param({"pp": 2}, marks=pytest.mark.full), {"pp": 2, "vpp": 2}],
    ids=["1f1b", "interleaved"],
)
def test_pipeline_schedules(pool, layout):
    step = {"num_microbatches": 4, "micro_batch_size": 1}
    whole = indexer_gradients(pool, **step, overrides={"num_layers": 4})
    # The settings of Megatron-LM's interleaved schedule.
    p2p = {"overlap_p2p_comm": "vpp" in layout, "batch_p2p_comm": "vpp" not in layout}
    split = indexer_gradients(pool, 2, **step, overrides={"num_layers": 4, **p2p}, **layout)
    assert_same_gradients(split, whole)
