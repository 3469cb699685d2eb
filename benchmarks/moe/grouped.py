"""Grouped experts compared with Megatron's sequential ones on one core: time, matmul rate, copies.

Measured in a separate process, ``python -m benchmarks.moe.grouped``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.model import deterministic_layers
from benchmarks.registry import Metrics

EXPERTS, ROWS, ROUNDS = 64, 4096, 9
WIDTHS = ((512, 256), (1024, 512))
"""Hidden size and width of an expert."""
DEVIATION = 1e-5
_MODULES = ("sequential", "grouped")


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries; the link is not used."""
    sizes = {"experts": 4, "rows": 64, "rounds": 1, "widths": [(32, 16)]} if quick else {}
    root = Path(__file__).parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, json.dumps(sizes)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"grouped: {found}", file=sys.stderr, flush=True)
    return metrics(found)


def metrics(found: Mapping[str, Any]) -> Metrics:
    """Convert measured times to ratios.

    Args:
        found: results of :func:`measure` by widths.
    """
    ratios = {
        name: {
            "speedup": figures["milliseconds"]["sequential"] / figures["milliseconds"]["grouped"],
            "fraction": figures["milliseconds"]["matmuls"] / figures["milliseconds"]["products"],
        }
        for name, figures in found.items()
    }
    return {
        "grouped_matmul_speedup": min(figures["speedup"] for figures in ratios.values()),
        "grouped_fraction_of_matmul": min(figures["fraction"] for figures in ratios.values()),
        "grouped_weight_copies_per_step": max(figures["copies"] for figures in found.values()),
        "grouped": {name: {**figures, **found[name]["milliseconds"]} for name, figures in ratios.items()},
        "grouped_deviation": max(figures["deviation"] for figures in found.values()),
    }


def measure(hidden: int, ffn: int, experts: int, rows: int, rounds: int) -> dict[str, Any]:
    """Return least milliseconds of alternating variants, forward and backward into ``main_grad``, in fp32.

    Variants: ``sequential`` and ``grouped`` are Megatron's modules under its DDP. ``products`` is only the
    six grouped matmuls of the grouped module, and ``matmuls`` six of the same size with one matrix each.

    Raises:
        RuntimeError: outputs or gradients of the modules differ.
    """
    counts = uneven(experts, rows)
    modules = {name: _module(name, hidden, ffn, experts) for name in _MODULES}
    deviation = _compare(modules, counts, hidden)
    works: dict[str, Callable[[], object]] = {
        name: _step_of(module, counts, hidden) for name, module in modules.items()
    }
    works |= {
        "products": _products(modules["grouped"], counts),
        "matmuls": _products(modules["grouped"], [rows]),
    }
    with _WeightCopies(hidden * ffn * experts) as copies:
        works["grouped"]()
    return {
        "milliseconds": minima(works, rounds),
        "copies": copies.count,
        "deviation": deviation,
    }


def uneven(experts: int, rows: int) -> list[int]:
    """Return shuffled row counts of experts with popularity ``rank ** -0.5``; some have few."""
    popularity = torch.arange(1, experts + 1).double().rsqrt()
    drawn = torch.multinomial(popularity, rows, True, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(1))
    counts: list[int] = torch.bincount(drawn, minlength=experts)[order].tolist()
    return counts


def _module(name: str, hidden: int, ffn: int, experts: int) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    grouped = name == "grouped"
    sizes = {"num_layers": 1, "hidden_size": hidden, "num_attention_heads": 8, "ffn_hidden_size": ffn}
    cfg = TransformerConfig(
        **deterministic_layers(**sizes, moe_ffn_hidden_size=ffn, num_moe_experts=experts),
        moe_grouped_gemm=grouped,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        transformer_impl="local",
    )
    spec = get_gpt_layer_local_spec(experts, moe_grouped_gemm=grouped)
    layer = build_module(spec.submodules.mlp, config=cfg)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(cfg, ddp, layer.experts)


def _step_of(module: Any, counts: Sequence[int], hidden: int) -> Callable[[], tuple[Tensor, Tensor]]:
    noise = torch.Generator().manual_seed(2)
    rows, grad = (torch.randn(sum(counts), hidden, generator=noise) for _ in range(2))
    probs, tokens = torch.rand(sum(counts), generator=noise), torch.tensor(counts)

    def step() -> tuple[Tensor, Tensor]:
        leaf = rows.detach().requires_grad_()
        output, _ = module(leaf, tokens, probs)
        output.backward(grad)
        assert leaf.grad is not None
        return output.detach(), leaf.grad

    return step


def _compare(modules: Mapping[str, Any], counts: Sequence[int], hidden: int) -> float:
    grouped, sequential = modules["grouped"].module, modules["sequential"].module
    grouped.load_state_dict(sequential.state_dict())
    results: dict[str, list[Tensor]] = {}
    for name, module in modules.items():
        module.zero_grad_buffer()
        results[name] = list(_step_of(module, counts, hidden)())
    for name in ("linear_fc1", "linear_fc2"):
        linear = getattr(grouped.mlp, name)
        results["grouped"] += linear.by_expert(linear.weight.main_grad)
        results["sequential"] += [
            getattr(expert, name).weight.main_grad for expert in sequential.local_experts
        ]
    pairs = zip(results["grouped"], results["sequential"], strict=True)
    worst = max(float((ours - stock).norm() / max(stock.norm(), 1e-30)) for ours, stock in pairs)
    if not worst <= DEVIATION:
        raise RuntimeError(f"grouped experts differ from sequential ones by {worst:.1e}; they are not timed")
    return worst


def _products(module: Any, counts: Sequence[int]) -> Callable[[], object]:
    """Return a function for forward, dX and dW of both layers, with one matrix for each number of rows."""
    from mindspeed_dsa.ops.grouped_matmul import Groups
    from mindspeed_dsa.ops.grouped_matmul.backends import Cpu

    noise, groups, cpu = torch.Generator().manual_seed(3), Groups(counts), Cpu()
    operands = []
    for name in ("linear_fc1", "linear_fc2"):
        stack = getattr(module.module.mlp, name).weight.detach()[: len(counts)].transpose(1, 2)
        sides = [torch.randn(sum(counts), width, generator=noise) for width in stack.shape[1:]]
        operands.append((*sides, stack, torch.zeros_like(stack)))

    def work() -> None:
        for rows, grad, stack, main_grad in operands:
            cpu.multiply(rows, stack, groups)
            cpu.multiply(grad, stack.transpose(1, 2), groups)
            cpu.weight_gradient(rows, grad, groups, main_grad, True)

    return work


class _WeightCopies(TorchDispatchMode):
    """Counter of copies of tensors at least as large as a stack."""

    _KINDS = ("clone", "copy_", "_to_copy", "contiguous", "stack", "cat")

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self._KINDS and isinstance(result, Tensor) and result.numel() >= self._size:
            self.count += 1
        return result


def minima(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return least milliseconds of alternating variants; the first round is discarded."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            works[name]()
            if number:
                samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(times) for name, times in samples.items()}


def main(sizes: Mapping[str, Any]) -> None:
    """Measure in this process and print one line of JSON."""
    import torch.distributed as dist

    import mindspeed_dsa

    torch.set_num_threads(1)
    mindspeed_dsa.enable(moe_grouped_gemm=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    experts, rows = sizes.get("experts", EXPERTS), sizes.get("rows", ROWS)
    results = {
        f"{experts} experts, {hidden} x {ffn}": measure(
            hidden, ffn, experts, rows, sizes.get("rounds", ROUNDS)
        )
        for hidden, ffn in sizes.get("widths", WIDTHS)
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
