"""The worker pool itself: all other tests rely on it to fail when something goes wrong."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import CaseError, WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Yield a separate pool: the failures below would cost the other tests their warm workers."""
    with WorkerPool(size=2) as workers:
        yield workers


def test_results_come_by_rank_and_processes_are_reused(pool: WorkerPool) -> None:
    first = pool.run(f"{__name__}:describe", 2, payload=torch.ones(3))
    again = pool.run(f"{__name__}:describe", 1, payload=torch.full((2,), 5.0))
    assert [result["rank"] for result in first] == [0, 1]
    assert [result["world_size"] for result in first] == [2, 2]
    assert all(torch.equal(result["total"], torch.full((3,), 3.0)) for result in first)
    assert torch.equal(again[0]["total"], torch.full((2,), 5.0))
    assert again[0]["pid"] == first[0]["pid"] != os.getpid()
    assert {result["threads"] for result in (*first, *again)} == {1}


def test_an_exception_on_one_rank_fails_the_case_with_its_traceback(pool: WorkerPool) -> None:
    before = pool.run(f"{__name__}:describe", 2, payload=torch.ones(1))
    with pytest.raises(CaseError) as error:
        pool.run(f"{__name__}:raise_on_one_rank", 2, rank=1)
    assert "rank 1 raised" in str(error.value)
    assert "RuntimeError: no luck on rank 1" in str(error.value)
    assert "about to go wrong" in str(error.value)
    after = pool.run(f"{__name__}:describe", 2, payload=torch.ones(1))
    assert {result["pid"] for result in after}.isdisjoint(result["pid"] for result in before)


def test_a_rank_that_dies_fails_the_case(pool: WorkerPool) -> None:
    with pytest.raises(CaseError, match="rank 1 died with exit code 7"):
        pool.run(f"{__name__}:die_on_one_rank", 2, rank=1)
    assert len(pool.run(f"{__name__}:describe", 2, payload=torch.ones(1))) == 2


@pytest.mark.full
def test_a_rank_that_hangs_fails_the_case_with_its_stack(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:describe", 2, payload=torch.ones(1))  # start-up does not count
    with pytest.raises(CaseError) as error:
        pool.run(f"{__name__}:hang_on_one_rank", 2, timeout_s=5, rank=0)
    assert "rank 0 did not answer in time" in str(error.value)
    assert "in fall_asleep" in str(error.value)


def test_a_result_that_cannot_be_sent_fails_the_case(pool: WorkerPool) -> None:
    with pytest.raises(CaseError, match="the result cannot be sent"):
        pool.run(f"{__name__}:return_what_cannot_be_sent", 1)


def test_more_ranks_than_workers_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="2 workers at most; 3 ranks"):
        pool.run(f"{__name__}:describe", 3, payload=torch.ones(1))


@pytest.mark.full
def test_nothing_of_a_case_is_left_for_the_next(pool: WorkerPool) -> None:
    untouched = pool.run(f"{__name__}:what_is_left", 2)
    pool.run(f"{__name__}:change_everything", 2)
    assert pool.run(f"{__name__}:what_is_left", 2) == untouched
    pool.run(f"{__name__}:change_everything", 2)  # and it can all be done again


# -- functions that the ranks run ------------------------------------------------------------------


def describe(payload: torch.Tensor) -> dict[str, Any]:
    total = payload * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return {
        "pid": os.getpid(),
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "threads": torch.get_num_threads(),
        "total": total,
    }


def raise_on_one_rank(rank: int) -> None:
    print("about to go wrong")
    if dist.get_rank() == rank:
        raise RuntimeError(f"no luck on rank {rank}")
    dist.all_reduce(torch.ones(1))


def die_on_one_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def hang_on_one_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        fall_asleep()


def fall_asleep() -> None:
    time.sleep(600)


def return_what_cannot_be_sent() -> Any:
    return lambda: None


def change_everything() -> None:
    """Change every global that a case may change."""
    from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.moe import moe_utils

    import mindspeed_dsa

    mindspeed_dsa.enable(experimental_attention_variant="dsa")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 8, 1, 1)
    dsa.DSAIndexerLossLoggingHelper.tracker["values"] = torch.ones(1)
    dsa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(0.5))
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.5))
    moe_utils.save_to_aux_losses_tracker("load_balancing_loss", torch.tensor(1.0), 1, 1)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.bfloat16)
    parallel_state.set_virtual_pipeline_model_parallel_rank(1)


def what_is_left() -> dict[str, Any]:
    """Return the state of those globals in a case."""
    from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.moe import moe_utils

    import mindspeed_dsa

    generators = sys.modules["megatron.core.tensor_parallel.random"]
    return {
        "sites": mindspeed_dsa.report(),
        "model parallel": parallel_state.model_parallel_is_initialized(),
        "virtual rank": parallel_state.get_virtual_pipeline_model_parallel_rank(),
        "rng tracker": generators._CUDA_RNG_STATE_TRACKER_INITIALIZED,
        "rng states": list(tensor_parallel.get_cuda_rng_tracker().get_states()),
        "microbatches": num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR,
        "indexer losses": dict(dsa.DSAIndexerLossLoggingHelper.tracker),
        "indexer scale": dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale,
        "aux scale": moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale,
        "aux losses": dict(moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": str(torch.get_default_dtype()),
    }
