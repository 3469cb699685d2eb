"""One column or row parallel layer, stock and overlapped; runs in the pool's workers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


def compare(
    layer: str,
    sequence: int = 12,
    batch: int | None = 2,
    switches: Mapping[str, Any] | None = None,
    dtype: str = "float64",
    **options: Any,
) -> dict[str, Any]:
    """Relative differences from stock by tensor, which of them are equal bit for bit, and what was called.

    Args:
        layer: ``column`` or ``row``.
        sequence: length of the whole sequence.
        batch: second dimension; none for inputs of two dimensions.
        switches: of the feature.
        dtype: of everything.
        **options: for :func:`_run`.
    """
    import mindspeed_dsa

    found = []
    for wanted in ({}, switches or {"coc_parallel_num": 2}):
        mindspeed_dsa.disable()
        mindspeed_dsa.enable(**wanted)
        _groups()
        with counted() as calls:
            found.append(_run(layer, sequence, batch, getattr(torch, dtype), **options))
    stock, overlapped = found
    assert stock.keys() == overlapped.keys()
    return {
        "errors": {name: relative(overlapped[name], stock[name]) for name in stock},
        "bitwise": sorted(name for name in stock if overlapped[name].equal(stock[name])),
        "calls": dict(calls),
        "sizes": {name: list(tensor.shape) for name, tensor in overlapped.items()},
    }


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of ``theirs``."""
    assert ours.shape == theirs.shape
    assert theirs.norm() > 0
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each collective is called by the layers."""
    calls: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, _counting(name, getattr(dist, name), calls)))
        yield calls


def _counting(name: str, original: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    return call


def _groups() -> None:
    """All ranks are one tensor parallel group."""
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def _run(
    layer: str,
    sequence: int,
    batch: int | None,
    dtype: torch.dtype,
    sequence_parallel: bool = True,
    bias: bool = True,
    skip_bias_add: bool = False,
    frozen: bool = False,
    transposed: bool = False,
    input_is_parallel: bool = True,
    main_grad: bool = False,
    passes: int = 1,
) -> dict[str, Tensor]:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = ModelParallelConfig(
        tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel, params_dtype=dtype
    )
    common = {
        "config": config,
        "init_method": lambda weight: torch.nn.init.normal_(weight, std=0.3),
        "bias": bias,
        "skip_bias_add": skip_bias_add,
    }
    width, out = 5 * ranks, 7 * ranks
    if layer == "column":
        module = ColumnParallelLinear(width, out, gather_output=False, **common)
        shape = [sequence // ranks if sequence_parallel else sequence, batch, width]
    else:
        module = RowParallelLinear(width, out, input_is_parallel=input_is_parallel, **common)
        shape = [sequence, batch, width // ranks if input_is_parallel else width]
    shape = [size for size in shape if size is not None]
    same_everywhere = not sequence_parallel and (layer == "column" or not input_is_parallel)
    generator = torch.Generator().manual_seed(3 if same_everywhere else 5 + rank)
    with torch.no_grad():
        if bias:
            module.bias.copy_(torch.arange(module.bias.numel(), dtype=dtype) / 8)
    module.weight.requires_grad_(not frozen)
    if main_grad:
        module.gradient_accumulation_fusion = True
        module.weight.main_grad = torch.ones_like(module.weight, dtype=torch.float32)
        module.weight.grad_added_to_main_grad = False
    found: dict[str, Tensor] = {}
    for number in range(passes):
        input = torch.randn(shape, generator=generator, dtype=dtype)
        if transposed:  # the same numbers in another order of memory
            input = input.transpose(0, -1).contiguous().transpose(0, -1)
        input.requires_grad_()
        output, returned_bias = module(input)
        if returned_bias is not None:
            output = output + returned_bias
        # The gradient of a reduced output is the same on all ranks, otherwise each has its own.
        seed = 11 if layer == "row" and not sequence_parallel else 13 + rank
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        if transposed:
            grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
        output.backward(grad)
        found[f"output {number}"], found[f"input {number}"] = output.detach(), input.grad
    if main_grad:
        assert module.weight.grad_added_to_main_grad
        found["main_grad"] = module.weight.main_grad
    elif not frozen:
        found["weight"] = module.weight.grad
    if bias and module.bias.grad is not None:
        found["bias"] = module.bias.grad
    return found
