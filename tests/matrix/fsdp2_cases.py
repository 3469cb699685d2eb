"""Training steps with Megatron's optimizer, weights whole or sharded by FSDP2, on any release; in workers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_dsa.parallel.local_shards import local_of
from tests.matrix import memory_cases
from tests.matrix import model as tiny
from tests.matrix.feature_cases import MODEL, job_of_any_release
from tests.matrix.record import at_work
from tests.support import memory_events, optimizer_job
from tests.support import model as job

STEPS = 2


def train(switches: Mapping[str, Any] | None = None, pp: int = 1, ep: int = 1) -> dict[str, Any]:
    """Losses and norms of all steps, gradients of the first one, and what FSDP2 did.

    Returns:
        ``gathered ahead``: units' weights that were gathered, or on their way, when the first layer began.
    """
    switches = dict(switches or {})
    overrides = {**MODEL, "pipeline_model_parallel_size": pp, "expert_tensor_parallel_size": 1}
    with (
        job_of_any_release(1, 0),
        mock.patch.object(optimizer_job, "config", memory_cases._config),
        mock.patch.object(optimizer_job, "gpt_model", tiny.gpt_model),
        memory_events.counted() as counts,
    ):
        job.start(switches, pp=pp, ep=ep, etp=1)
        fsdp2 = "use_torch_fsdp2" in switches
        made = optimizer_job.assemble(precision="fp32", ep=ep, overrides=overrides, fsdp2=fsdp2)
        gradients: dict[str, Tensor] = {}
        records = []
        with _before_the_first_layer(made.model, counts) as ahead:
            for number in range(STEPS):
                losses = optimizer_job.forward_backward(made, number)
                gradients = gradients or _gradients(made.model.module)
                _, norm, _ = made.optimizer.step()
                records.append({"losses": losses, "norm": float(norm)})
        return {
            "records": records,
            "gradients": gradients,
            "sharded": sum(isinstance(each, DTensor) for each in made.model.parameters()),
            "gathered ahead": ahead[0],
            "counts": dict(counts),
            "at work": at_work(),
        }


@contextlib.contextmanager
def _before_the_first_layer(model: torch.nn.Module, counts: Counter[str]) -> Iterator[list[int]]:
    """How many gathers had been started whenever this rank's first layer began."""
    found: list[int] = []

    def note(*unused: Any) -> None:
        found.append(counts[memory_events.GATHERED])

    layers: Any = model.module.decoder.layers
    handle = layers[0].register_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Whole ones by their names in a model on one rank, put together from all shards."""
    found = {}
    for name, parameter in job.global_names(model).items():
        if isinstance(parameter, DTensor):
            found[name] = _put_together(parameter.grad)
        else:
            found[name] = parameter.main_grad.clone()
    return found


def _put_together(shard: Any) -> Tensor:
    """As ``full_tensor()``, which looks for the groups of a mesh like this one that an earlier case had."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    (placement,) = shard.placements
    own = local_of(shard).contiguous()
    pieces = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(pieces, own, group=group)
    return torch.cat(pieces, dim=placement.dim)
