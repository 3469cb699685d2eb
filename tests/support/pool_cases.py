"""What the workers run in ``test_pool.py``."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist


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
    """Leave a mark in every global that a case may change."""
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
    """What a case finds of those marks."""
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
