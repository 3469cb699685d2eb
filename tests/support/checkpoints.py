"""Saving and loading as Megatron's training loop does it, by each of its formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mindspeed_dsa.megatron.releases import takes
from tests.support.optimizer_job import Job, gather

PLAIN = "torch_dist"  # without the distributed optimizer
TORCH = "torch"  # the old format: state dicts and, for the distributed optimizer, a file of parameter states


def save_to(job: Job, way: str, folder: str) -> None:
    """``way`` is ``torch`` or the distributed optimizer's sharding type in a torch_dist checkpoint."""
    from megatron.core import parallel_state

    gather(job)
    if way == TORCH:
        state, parameters = _files(folder)
        if parallel_state.get_expert_data_parallel_rank() == 0:
            content = {"model": job.model.state_dict_for_save_checkpoint()}
            torch.save({**content, "optimizer": job.optimizer.state_dict()}, state)
        if job.ddp.use_distributed_optimizer:
            job.optimizer.save_parameter_state(parameters)
        torch.distributed.barrier()
        return
    from dsa_job.torch_dist import save_in_this_process
    from megatron.core import dist_checkpointing

    # Megatron's writer needs psutil.
    dist_checkpointing.save(_sharded(job, way, is_loading=False), folder, save_in_this_process())


def load_from(job: Job, way: str, folder: str) -> None:
    """The counterpart; model first, then optimizer, like Megatron."""
    if way == TORCH:
        state = torch.load(_files(folder)[0], weights_only=False)
    else:
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(_sharded(job, way, is_loading=True), folder)
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    if way == TORCH and job.ddp.use_distributed_optimizer:
        job.optimizer.load_parameter_state(_files(folder)[1])


def _files(folder: str) -> tuple[str, str]:
    """Of this expert parallel rank; like Megatron's, they are written once for all of its replicas."""
    from megatron.core import parallel_state

    rank = parallel_state.get_expert_model_parallel_rank()
    return str(Path(folder, f"state-{rank}.pt")), str(Path(folder, f"parameters-{rank}.pt"))


def _sharded(job: Job, way: str, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": way, "chained_optim_avoid_prefix": True}
    # FSDP2's optimizers know the distributed optimizer's formats.
    fsdp2 = hasattr(job.ddp, "reshard_after_forward")
    if way == PLAIN or not (job.ddp.use_distributed_optimizer or fsdp2):
        metadata.pop("distrib_optim_sharding_type")
    model = job.model.module.sharded_state_dict()
    how: dict[str, Any] = {"metadata": metadata}
    if not takes(type(job.parts[0]).sharded_state_dict, "metadata"):  # before 0.14
        how = {"sharding_type": way} if job.ddp.use_distributed_optimizer else {}
    optimizer = job.optimizer.sharded_state_dict(model, is_loading=is_loading, **how)
    return {"model": model, "optimizer": optimizer}
