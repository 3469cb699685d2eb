"""One rank of a model that FSDP2 shards, beside the same model in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mindspeed_dsa.integrations.transformers import use
from tests.hosts.transformers.models import build, close, tokens


def compare(before: bool):
    """Return whether losses are those of one process with the batch of both, and gradients that are not."""
    ids = tokens(4)
    alone = build("glm_moe_dsa sharing")
    whole = use(alone, loss_coefficient=0.5)
    alone(ids, labels=ids, use_cache=False).loss.backward()
    expected = {name: x.grad for name, x in alone.named_parameters() if x.grad is not None}

    model = build("glm_moe_dsa sharing")
    in_use = use(model, loss_coefficient=0.5) if before else None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if in_use is None:
        in_use = use(model, loss_coefficient=0.5)
    own = ids.chunk(dist.get_world_size())[dist.get_rank()]
    model(own, labels=own, use_cache=False).loss.backward()
    losses = torch.stack(list(in_use.losses.values())).detach()
    dist.all_reduce(losses)
    found = {name: x.grad.full_tensor() for name, x in model.named_parameters() if x.grad is not None}
    wrong = [name for name, x in expected.items() if name not in found or not close(found[name], x, 1e-4)]
    return {
        "losses": close(losses / dist.get_world_size(), torch.stack(list(whole.losses.values())).detach()),
        "gradients": wrong + sorted(found.keys() - expected.keys()),
    }
