"""One rank of layers that FSDP2 shards, and of steps with moments on the host, compared with one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mindspeed_dsa.integrations.torchtitan import by_config
from mindspeed_dsa.integrations.torchtitan.swapped_moments import on_host, swap_moments
from mindspeed_dsa.parallel.local_shards import local_of
from tests.hosts.torchtitan.config_registry import model

ROWS = 24


def layers(stage: str, batch: int) -> nn.ModuleList:
    """Build three dense blocks with sparse attention; all weights except their indexers' are frozen."""
    options = by_config.SparseOptions(topk=8, index_heads=4, index_dim=32, stage=stage)
    torch.manual_seed(0)
    built = nn.ModuleList()
    for _ in range(3):
        config = model().layers[0]
        config.attention = by_config.sparse(config.attention, options, batch * ROWS)
        config.attention.rope.max_seq_len = ROWS
        block = config.build()
        block.init_states()
        built.append(block)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    return built


def backward(blocks: nn.ModuleList, hidden: torch.Tensor) -> None:
    for block in blocks:
        hidden = block(hidden, None)
    hidden.square().mean().backward()


def compare(stage: str) -> list[str]:
    """Return the names of gradients that differ from one process's with the whole batch."""
    ranks = dist.get_world_size()
    hidden = torch.randn(2 * ranks, ROWS, 64, generator=torch.Generator().manual_seed(1))
    alone, sharded = layers(stage, 2 * ranks), layers(stage, 2 * ranks)
    backward(alone, hidden)
    for block in sharded:
        fully_shard(block, mesh=init_device_mesh("cpu", (ranks,)))
    backward(sharded, hidden.chunk(ranks)[dist.get_rank()])
    wrong = []
    for (name, expected), param in zip(alone.named_parameters(), sharded.parameters(), strict=True):
        if ".indexer." in name:
            # FSDP2 averages over ranks; losses are divided by the rows of all ranks already.
            error = (param.grad.full_tensor() * ranks - expected.grad).abs().max()
            if error > 1e-4 * expected.grad.abs().max():
                wrong.append(name)
        elif param.grad is not None:
            wrong.append(name)
    return wrong


def moments_like_meta_weights() -> bool:
    """Return whether the moments of weights on another device have the given memory of the host."""
    weight = distribute_tensor(
        torch.empty(6, 4, device="meta"), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)]
    )
    values = torch.arange(12.0).view(3, 4)
    moment = on_host(weight, values)
    return (
        moment.device.type == "cpu"
        and moment.placements == weight.placements
        and moment.shape == weight.shape
        and local_of(moment).data_ptr() == values.data_ptr()
    )


def step_with_partial_gradients() -> float:
    """Return how far a step with summands of a gradient is from stock's, largest over all steps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh, [Replicate()])) for _ in range(2)]
    stock, swapped = (torch.optim.AdamW([weight], lr=0.1) for weight in weights)
    swap_moments([swapped], 2)
    for number in range(3):
        for weight in weights:
            generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
            summand = torch.randn(5, 4, generator=generator)
            weight.grad = DTensor.from_local(summand, mesh, [Partial()])
        stock.step()
        swapped.step()
    return float((weights[0] - weights[1]).abs().max().full_tensor())
