"""Code built on Megatron's parallel layers works with chunks: LoRA, sharded checkpoints, recomputation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.features.tensor_parallel.parallel_layers import build, counted, groups, relative

HERE = "tests.features.tensor_parallel.test_neighbours"
RANK = 3  # rank of LoRA's matrices
LAYERS = ("column", "row")


def lora(layer: str) -> torch.nn.Module:
    """Return a frozen parallel layer with two LoRA matrices, one of them parallel like the layer.

    The column parallel layer is a subclass that calls its parent's forward; the row parallel layer is
    wrapped. Libraries do both.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class LoRAColumn(ColumnParallelLinear):
        def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
            output, bias = super().forward(input, *args, **kwargs)
            return output + self.up(self.down(input))[0], bias

    class LoRARow(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, input: Tensor) -> Any:
            output, bias = self.base(input)
            return output + self.up(self.down(input)[0]), bias

    base = build(layer, torch.float64, bias=False)
    base.weight.requires_grad_(False)
    side = build(layer, torch.float64, bias=False)
    ranks = dist.get_world_size()
    down, up = noise(RANK, 5 * ranks, seed=1), noise(7 * ranks, RANK, seed=2)
    # This rank's part of the parallel matrix.
    mine = slice(dist.get_rank() * (7 if layer == "column" else 5), None)
    if layer == "column":
        side.weight, side.output_size_per_partition = torch.nn.Parameter(up[mine][:7].clone()), 7
        base.__class__, module = LoRAColumn, base
        module.down, module.up = plain(down), side
    else:
        side.weight = torch.nn.Parameter(down[:, mine][:, :5].clone())
        module = LoRARow(base)
        module.down, module.up = side, plain(up)
    return module


def plain(weight: Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.size(1), weight.size(0), bias=False, dtype=weight.dtype)
    linear.weight = torch.nn.Parameter(weight)
    return linear


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(module: torch.nn.Module, layer: str, recompute: bool = False) -> dict[str, Tensor]:
    """Return the output and all gradients of one microbatch with sequence parallelism."""
    from megatron.core import tensor_parallel

    ranks, rank = dist.get_world_size(), dist.get_rank()
    shape = (12 // ranks, 2, 5 * ranks) if layer == "column" else (12, 2, 5)
    input = noise(*shape, seed=10 + rank).requires_grad_()
    if recompute:
        output = tensor_parallel.checkpoint(lambda rows: module(rows)[0], False, input)
    else:
        output = module(input)[0]
    output.backward(noise(*output.shape, seed=20 + rank))
    weights = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
    return {"output": output.detach(), "input": input.grad, **weights}


def with_lora() -> dict[str, Any]:
    """Return each layer's difference from stock, its trained weights and its collectives."""
    import mindspeed_dsa

    mindspeed_dsa.enable()
    groups()
    stock = {layer: step(lora(layer), layer) for layer in LAYERS}
    mindspeed_dsa.disable()
    mindspeed_dsa.enable(coc_parallel_num=2)
    results = {}
    for layer in LAYERS:
        module = lora(layer)
        with counted() as calls:
            ours = step(module, layer)
        assert ours.keys() == stock[layer].keys()
        errors = [relative(ours[name], stock[layer][name]) for name in ours]
        results[layer] = max(errors), sorted(ours), dict(calls)
    return results


def test_lora(pool):
    for found in pool.run(f"{HERE}:with_lora", 2):
        for layer, (error, names, calls) in found.items():
            assert error <= 1e-13, layer
            assert names == ["down.weight", "input", "output", "up.weight"]
            # The base layer and the adapter's parallel matrix: two chunks each.
            assert (calls["all_gather"], calls["all_to_all_single"]) == (4, 4), layer


def sharded() -> list[Any]:
    """Return keys and offsets of the sharded state, without and with chunks."""
    from megatron.core import parallel_state

    import mindspeed_dsa

    states = []
    for switches in ({}, {"coc_parallel_num": 2}):
        mindspeed_dsa.enable(**switches)
        groups()
        for layer in LAYERS:
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            state = build(layer, torch.float32).sharded_state_dict(
                prefix="layer.", metadata={"dp_cp_group": replicas}
            )
            states.append(
                {
                    name: (each.key, each.global_shape, each.global_offset, each.replica_id)
                    for name, each in state.items()
                    if hasattr(each, "global_shape")
                }
            )
        mindspeed_dsa.disable()
    return states


def test_sharded_state_is_the_same(pool):
    ranks = pool.run(f"{HERE}:sharded", 2)
    for column, row, our_column, our_row in ranks:
        assert column.keys() == row.keys() >= {"layer.weight", "layer.bias"}
        assert (our_column, our_row) == (column, row)
    column, row = ranks[1][:2]
    assert column["layer.weight"] != row["layer.weight"]


def recomputed() -> dict[str, Any]:
    """Return whether recomputation changes nothing, and the collectives without and with it."""
    import mindspeed_dsa

    mindspeed_dsa.enable(coc_parallel_num=2)
    groups()
    by_layer = {}
    for layer in LAYERS:
        results, calls = [], []
        for recompute in (False, True):
            with counted() as counts:
                results.append(step(build(layer, torch.float64, bias=False), layer, recompute))
            calls.append((counts["all_gather"], counts["all_to_all_single"]))
        kept, again = results
        assert kept.keys() == again.keys()
        by_layer[layer] = all(kept[name].equal(again[name]) for name in kept), calls
    return by_layer


def test_recomputed_layers(pool):
    for result in pool.run(f"{HERE}:recomputed", 2):
        # Recomputation runs the forward's collectives once more.
        assert result["column"] == (True, [(2, 2), (4, 2)])
        assert result["row"] == (True, [(2, 2), (2, 4)])
