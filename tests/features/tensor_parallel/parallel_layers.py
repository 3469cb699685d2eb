"""Column and row parallel layers, stock and overlapped; runs in the pool's workers."""

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

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_to_all_single", "all_reduce")


def compare(runs: Sequence[Mapping[str, Any]], switches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each of the switches and each of the runs: how far from stock, and which collectives were called.

    Args:
        runs: keywords of :func:`run`.
        switches: of the feature.
    """
    import mindspeed_dsa

    mindspeed_dsa.enable()
    groups()
    # By torch's own reduce-scatter: the CPU platform's is made of what our layers are made of.
    with mock.patch.object(collectives, "_can_exchange", return_value=False):
        stock = [run(**each) for each in runs]
    found = []
    for wanted in switches:
        mindspeed_dsa.disable()
        mindspeed_dsa.enable(**wanted)
        for each, theirs in zip(runs, stock, strict=True):
            with counted() as calls:
                ours = run(**each)
            assert ours.keys() == theirs.keys()
            found.append(
                {
                    "case": {**wanted, **each},
                    "errors": {name: relative(ours[name], theirs[name]) for name in theirs},
                    "bitwise": sorted(name for name in theirs if ours[name].equal(theirs[name])),
                    "calls": dict(calls),
                    "matmul_by_rows": matmul_by_rows(each, wanted.get("coc_parallel_num", 1)),
                }
            )
    return found


def matmul_by_rows(case: Mapping[str, Any], chunks: int) -> bool:
    """Whether this machine's matmul of a column layer's chunk gives the bits of the whole one's rows.

    Some processors' libraries take another kernel, with another order of sums, where rows are few.
    """
    ranks = dist.get_world_size()
    rows = case["sequence"] // ranks * 2 if "sequence" in case else 12 // ranks * 2
    noise = torch.Generator().manual_seed(7)
    dtype = getattr(torch, case.get("dtype", "float64"))
    input = torch.randn(ranks * rows, 5 * ranks, generator=noise, dtype=torch.float64).to(dtype)
    weight = torch.randn(7, 5 * ranks, generator=noise, dtype=torch.float64).to(dtype).t()
    parts = [input[first:end] @ weight for first, end in bounds(ranks * rows, ranks * chunks)]
    return torch.cat(parts).equal(input @ weight)


def compare_tuned(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same for ``--use-ascend-coc``, with the choices of each run: 4 chunks win every measurement."""
    from mindspeed_dsa.features.tensor_parallel.overlap import tuning

    times, found = {1: 1.0, 2: 0.8, 4: 0.5, 8: 0.8}, []
    with mock.patch.object(tuning, "slowest", return_value=times):
        for each in runs:
            tuning.forget()
            (result,) = compare([each], [{"use_ascend_coc": True}])
            chosen = {problem.kind: chunks for problem, chunks in tuning.chosen().items()}
            found.append({**result, "chosen": chosen})
    tuning.forget()
    return found


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of ``theirs``."""
    assert ours.shape == theirs.shape
    assert theirs.norm() > 0
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each collective is called; a reduce-scatter is an exchange here, ``all_to_all_single``."""
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
    """All ranks are one tensor parallel group."""
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
    """A layer whose matmul is ``[..., 5 tp] @ [5 tp, 7]`` or ``[..., 5] @ [5, 7 tp]`` on each rank."""
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
    """Two microbatches through a layer; outputs, gradients of inputs, accumulated gradients of parameters.

    Args:
        layer: ``column`` or ``row``.
        sequence: length of the whole sequence.
        batch: second dimension; none for inputs of two dimensions.
        dtype: of weights and inputs.
        sequence_parallel: as in Megatron's configuration.
        frozen: the weight does not learn.
        transposed: input and output gradient lie in memory in another order.
        input_is_parallel: of the row parallel layer.
        main_grad: dtype in which gradients accumulate through gradient accumulation fusion.
        backward: whether there is one.
        **options: for :func:`build`.
    """
    kind = getattr(torch, dtype)
    module = build(
        layer, kind, sequence_parallel=sequence_parallel, input_is_parallel=input_is_parallel, **options
    )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    local = sequence // ranks if layer == "column" and sequence_parallel else sequence
    width = 5 if layer == "row" and input_is_parallel else 5 * ranks
    shape = [size for size in (local, batch, width) if size is not None]
    same_everywhere = not sequence_parallel and (layer == "column" or not input_is_parallel)
    module.weight.requires_grad_(not frozen)
    found: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        if main_grad is not None:
            module.gradient_accumulation_fusion = True
            module.weight.main_grad = torch.ones_like(module.weight, dtype=getattr(torch, main_grad))
            module.weight.grad_added_to_main_grad = False
            stack.enter_context(wgrad_kernels())
        for number in range(2):
            input = _noise(shape, kind, 100 * number + (3 if same_everywhere else 5 + rank), transposed)
            input.requires_grad_()
            with torch.set_grad_enabled(backward):
                output, returned_bias = module(input)
                if layer == "column" or sequence_parallel:
                    output *= 2  # consumers work in place where stock's output can be changed
                if returned_bias is not None:
                    output = output + returned_bias
            found[f"output {number}"] = output.detach()
            if backward:
                # The gradient of a reduced output is the same on all ranks, otherwise each has its own.
                seed = 11 if layer == "row" and not sequence_parallel else 13 + rank
                output.backward(_noise(output.shape, kind, 100 * number + seed, transposed))
                found[f"input {number}"] = input.grad
    if main_grad is not None:
        assert module.weight.grad_added_to_main_grad
        found["main_grad"] = module.weight.main_grad
    elif module.weight.grad is not None:
        found["weight"] = module.weight.grad
    if module.bias is not None and module.bias.grad is not None:
        found["bias"] = module.bias.grad
    return found


def _noise(shape: Sequence[int], dtype: torch.dtype, seed: int, transposed: bool) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return noise.transpose(0, -1).contiguous().transpose(0, -1) if transposed else noise


@contextlib.contextmanager
def wgrad_kernels() -> Iterator[None]:
    """What Apex's kernels for gradient accumulation compute."""
    from megatron.core.tensor_parallel import layers

    class Kernels:
        @staticmethod
        def wgrad_gemm_accum_fp32(rows: Tensor, grad: Tensor, main_grad: Tensor) -> None:
            main_grad += grad.t().to(main_grad.dtype) @ rows.to(main_grad.dtype)

        wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32

    with mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", Kernels, create=True):
        yield


def with_arguments_by_position(name: str, **given: Any) -> dict[str, int]:
    """Collectives of one of Megatron's two functions where all that it takes is given by position.

    Args:
        name: of the function.
        **given: what beyond the group is not as it is where it is omitted.
    """
    from megatron.core.tensor_parallel import layers

    beyond = list(inspect.signature(getattr(layers, name)).parameters.values())[6:]
    defaults = {each.name: None if each.default is each.empty else each.default for each in beyond}
    import mindspeed_dsa

    mindspeed_dsa.enable(coc_parallel_num=2)
    groups()
    from megatron.core import parallel_state

    given["tp_group"] = parallel_state.get_tensor_model_parallel_group()
    rest = (None, False, True, True, *(given.get(each, default) for each, default in defaults.items()))
    with counted() as calls:
        getattr(layers, name)(torch.ones(6, 2, 5), torch.ones(7, 5), *rest)
    return dict(calls)


def left_to_megatron(case: str) -> dict[str, int]:
    """Collectives that are called for a layer that, but for the plain ones, is none of our business."""
    import mindspeed_dsa

    mindspeed_dsa.enable(coc_parallel_num=2)
    groups()
    from megatron.core.tensor_parallel import RowParallelLinear

    layer = "row" if case == "another matmul" or case.endswith("row") else "column"
    module = build(layer, torch.float32)
    if case.startswith("experts"):
        module.explicit_expert_comm, module.skip_bias_add = True, True
    if case == "another matmul":

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
        # Megatron's own backward of these needs Apex, or fails: it mixes types under autocast.
        if case not in ("deferred weight gradient", "autocast"):
            output.float().sum().backward()
    return dict(calls)
