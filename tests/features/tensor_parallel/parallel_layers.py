"""Worker functions: column and row parallel layers, stock and overlapped."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.parallel import collectives
from mindspeed_dsa.parallel.transfers import bounds
from tests.support import contexts

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_to_all_single", "all_reduce")


def compare(runs: Sequence[Mapping[str, Any]], switches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for all switches and runs, the difference from stock and the collectives called.

    Args:
        runs: keyword arguments of :func:`run`.
        switches: feature switches.
    """
    import mindspeed_dsa

    mindspeed_dsa.enable()
    groups()
    # With torch's own reduce-scatter, because the CPU platform's uses the code under test.
    with mock.patch.object(collectives, "_can_exchange", return_value=False):
        stock = [run(**case) for case in runs]
    results = []
    for wanted in switches:
        mindspeed_dsa.disable()
        mindspeed_dsa.enable(**wanted)
        for case, theirs in zip(runs, stock, strict=True):
            with counted() as calls:
                ours = run(**case)
            assert ours.keys() == theirs.keys()
            results.append(
                {
                    "case": {**wanted, **case},
                    "errors": {name: relative(ours[name], theirs[name]) for name in theirs},
                    "bitwise": sorted(name for name in theirs if ours[name].equal(theirs[name])),
                    "calls": dict(calls),
                    "matmul_by_rows": matmul_by_rows(case, wanted.get("coc_parallel_num", 1)),
                }
            )
    return results


def matmul_by_rows(case: Mapping[str, Any], chunks: int) -> bool:
    """Whether this machine's matmul of a column layer's chunk equals rows of the complete matmul bit for bit.

    Some CPU libraries use another kernel, with another order of sums, for few rows.
    """
    ranks = dist.get_world_size()
    # Rows per rank, times the batch of two.
    rows = case["sequence"] // ranks * 2 if "sequence" in case else 12 // ranks * 2
    noise = torch.Generator().manual_seed(7)
    dtype = getattr(torch, case.get("dtype", "float64"))
    input = torch.randn(ranks * rows, 5 * ranks, generator=noise, dtype=torch.float64).to(dtype)
    weight = torch.randn(7, 5 * ranks, generator=noise, dtype=torch.float64).to(dtype).t()
    parts = [input[first:end] @ weight for first, end in bounds(ranks * rows, ranks * chunks)]
    return torch.cat(parts).equal(input @ weight)


def compare_tuned(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run :func:`compare` for ``--use-ascend-coc``, with 4 chunks winning every measurement; also return
    choices.
    """
    from mindspeed_dsa.features.tensor_parallel.overlap import tuning

    # Four chunks are the fastest.
    times, results = {1: 1.0, 2: 0.8, 4: 0.5, 8: 0.8}, []
    with mock.patch.object(tuning, "slowest", return_value=times):
        for each in runs:
            (result,) = compare([each], [{"use_ascend_coc": True}])
            choices = {problem.kind: chunks for problem, chunks in tuned().items()}
            results.append({**result, "chosen": choices})
    return results


def tuned() -> Mapping[Any, int]:
    """Return the tuned problems of the running session, with their numbers of chunks."""
    from mindspeed_dsa.features.tensor_parallel.overlap.tuning import Tuning

    context = contexts.running("ascend-coc")
    assert context is not None
    return context.state(Tuning).chosen()


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference relative to the norm of ``theirs``."""
    assert ours.shape == theirs.shape
    assert theirs.norm() > 0
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of each collective; a reduce-scatter is an exchange here, ``all_to_all_single``."""
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


def groups() -> None:
    """Make all ranks one tensor parallel group."""
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def build(
    layer: str,
    dtype: torch.dtype,
    sequence_parallel: bool = True,
    bias: bool = True,
    skip_bias_add: bool = False,
    input_is_parallel: bool = True,
) -> Any:
    """Build a layer with the matmul ``[..., 5 tp] @ [5 tp, 7]`` or ``[..., 5] @ [5, 7 tp]`` on each rank."""
    from megatron.core import tensor_parallel
    from megatron.core.model_parallel_config import ModelParallelConfig

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    ranks = dist.get_world_size()
    common = {
        "config": ModelParallelConfig(
            tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel, params_dtype=dtype
        ),
        "init_method": lambda weight: torch.nn.init.normal_(weight, std=0.3),
        "bias": bias,
        "skip_bias_add": skip_bias_add,
    }
    if layer == "column":
        module = tensor_parallel.ColumnParallelLinear(5 * ranks, 7 * ranks, gather_output=False, **common)
    else:
        module = tensor_parallel.RowParallelLinear(
            5 * ranks, 7 * ranks, input_is_parallel=input_is_parallel, **common
        )
    if bias:
        with torch.no_grad():
            module.bias.copy_(torch.arange(module.bias.numel(), dtype=dtype) / 8)
    return module


def run(
    layer: str,
    sequence: int = 12,
    batch: int | None = 2,
    dtype: str = "float64",
    sequence_parallel: bool = True,
    frozen: bool = False,
    transposed: bool = False,
    input_is_parallel: bool = True,
    main_grad: str | None = None,
    backward: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Run two microbatches; return outputs, input gradients and accumulated parameter gradients.

    Args:
        layer: ``column`` or ``row``.
        sequence: length of the full sequence.
        batch: size of the second dimension; ``None`` for inputs of two dimensions.
        dtype: dtype of weights and inputs.
        sequence_parallel: value of Megatron's ``sequence_parallel``.
        frozen: whether the weight is frozen.
        transposed: whether input and output gradient have another memory order.
        input_is_parallel: value of the row parallel layer's argument.
        main_grad: dtype of the buffer for gradient accumulation fusion; ``None`` for no fusion.
        backward: whether backward runs.
        **options: options of :func:`build`.
    """
    kind = getattr(torch, dtype)
    module = build(
        layer, kind, sequence_parallel=sequence_parallel, input_is_parallel=input_is_parallel, **options
    )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    local = sequence // ranks if layer == "column" and sequence_parallel else sequence
    width = 5 if layer == "row" and input_is_parallel else 5 * ranks
    shape = [size for size in (local, batch, width) if size is not None]
    # Without sequence parallelism, ranks get the same input unless it is split already.
    same_everywhere = not sequence_parallel and (layer == "column" or not input_is_parallel)
    module.weight.requires_grad_(not frozen)
    tensors: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        if main_grad is not None:
            module.gradient_accumulation_fusion = True
            # Not 0, as after earlier microbatches.
            module.weight.main_grad = torch.ones_like(module.weight, dtype=getattr(torch, main_grad))
            module.weight.grad_added_to_main_grad = False
            stack.enter_context(wgrad_kernels())
        for number in range(2):
            input = _noise(shape, kind, 100 * number + (3 if same_everywhere else 5 + rank), transposed)
            input.requires_grad_()
            with torch.set_grad_enabled(backward):
                output, returned_bias = module(input)
                if layer == "column" or sequence_parallel:
                    output *= 2  # consumers work in place wherever stock's output allows it
                if returned_bias is not None:
                    output = output + returned_bias
            tensors[f"output {number}"] = output.detach()
            if backward:
                # The gradient of a reduced output is equal on all ranks; otherwise each rank has another one.
                seed = 11 if layer == "row" and not sequence_parallel else 13 + rank
                output.backward(_noise(output.shape, kind, 100 * number + seed, transposed))
                tensors[f"input {number}"] = input.grad
    if main_grad is not None:
        assert module.weight.grad_added_to_main_grad
        tensors["main_grad"] = module.weight.main_grad
    elif module.weight.grad is not None:
        tensors["weight"] = module.weight.grad
    if module.bias is not None and module.bias.grad is not None:
        tensors["bias"] = module.bias.grad
    return tensors


def _noise(shape: Sequence[int], dtype: torch.dtype, seed: int, transposed: bool) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return noise.transpose(0, -1).contiguous().transpose(0, -1) if transposed else noise


@contextlib.contextmanager
def wgrad_kernels() -> Iterator[None]:
    """Replace Apex's kernels for gradient accumulation fusion by torch operations."""
    from megatron.core.tensor_parallel import layers

    class Kernels:
        @staticmethod
        def wgrad_gemm_accum_fp32(rows: Tensor, grad: Tensor, main_grad: Tensor) -> None:
            main_grad += grad.t().to(main_grad.dtype) @ rows.to(main_grad.dtype)

        wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32

    with mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", Kernels, create=True):
        yield


def with_arguments_by_position(name: str, **given: Any) -> dict[str, int]:
    """Return the collectives of one of Megatron's two functions, called with positional arguments only.

    Args:
        name: name of the function.
        **given: arguments after the group that differ from their defaults.
    """
    from megatron.core.tensor_parallel import layers

    # The first six arguments are fixed below.
    beyond = list(inspect.signature(getattr(layers, name)).parameters.values())[6:]
    defaults = {
        parameter.name: None if parameter.default is parameter.empty else parameter.default
        for parameter in beyond
    }
    import mindspeed_dsa

    mindspeed_dsa.enable(coc_parallel_num=2)
    groups()
    from megatron.core import parallel_state

    given["tp_group"] = parallel_state.get_tensor_model_parallel_group()
    rest = (None, False, True, True, *(given.get(name, default) for name, default in defaults.items()))
    with counted() as calls:
        getattr(layers, name)(torch.ones(6, 2, 5), torch.ones(7, 5), *rest)
    return dict(calls)


def left_to_megatron(case: str) -> dict[str, int]:
    """Return the collectives of a layer that is left to Megatron, or of a plain layer."""
    import mindspeed_dsa

    mindspeed_dsa.enable(coc_parallel_num=2)
    groups()
    from megatron.core.tensor_parallel import RowParallelLinear

    layer = "row" if case == "another matmul" or case.endswith("row") else "column"
    module = build(layer, torch.float32)
    if case.startswith("experts"):
        module.explicit_expert_comm, module.skip_bias_add = True, True
    if case == "another matmul":
        # A subclass with a matmul of its own, as quantization makes it.
        class Quantised(RowParallelLinear):
            def _forward_impl(self, *args: Any, **kwargs: Any) -> Tensor:
                return super()._forward_impl(*args, **kwargs)

        module.__class__ = Quantised
    if case == "sharded weight":
        module.weight.__fsdp_param__ = True
    input = torch.randn(12, 2, module.weight.size(1), requires_grad=True)
    if case == "deferred weight gradient":
        module.config.defer_embedding_wgrad_compute = True
        module.config.wgrad_deferral_limit = 0
        module.embedding_activation_buffer, module.grad_output_buffer = [], []
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")
    with counted() as calls, autocast:
        output = module(input)[0]
        # Megatron's own backward of these needs Apex, or fails by mixing dtypes under autocast.
        if case not in ("deferred weight gradient", "autocast"):
            output.float().sum().backward()
    return dict(calls)
