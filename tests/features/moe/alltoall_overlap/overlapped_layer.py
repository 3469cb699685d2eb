"""Worker functions: a MoE layer with overlapped all-to-alls, and the stock layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import model, moe

SWITCH = {"moe_alltoall_overlap_comm": True}


def beside_stock(
    runs: Mapping[str, Mapping[str, Any]],
    tp: int = 1,
    ep: int = 2,
    etp: int = 1,
    switch: Mapping[str, Any] = SWITCH,
) -> dict[str, Any]:
    """Return stock's and our results of each run, and the number of transfers started.

    Args:
        runs: dict from name to the keyword arguments of :func:`run`.
        tp: tensor parallel size.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        switch: feature switches of our runs.
    """
    model.start(tp=tp, ep=ep, etp=etp)
    layout = {"tp": tp, "ep": ep, "expert_tensor_parallel_size": etp}
    theirs = {name: run(**layout, **arguments) for name, arguments in runs.items()}
    switch_on(switch)
    results: dict[str, Any] = {}
    for name, arguments in runs.items():
        with moe.transfers() as events:
            ours = run(**layout, **arguments)
        results[name] = {"ours": ours, "theirs": theirs[name], "launched": events.count("launch")}
    return results


def switch_on(switch: Mapping[str, Any] = SWITCH) -> None:
    """Turn the feature on; the process groups exist already."""
    import mindspeed_dsa

    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**{**model.DSA_ON, **switch})


def run(
    tp: int,
    ep: int,
    rows: Sequence[int] = (6, 6),
    dtype: str = "float32",
    to_one: bool = False,
    frozen: Sequence[str] = (),
    tied: bool = False,
    adapter: bool = False,
    fusion: bool = False,
    graph: bool = True,
    expert_tensor_parallel_size: int = 1,
    **overrides: Any,
) -> dict[str, Any]:
    """Run the forward of all microbatches, then their backward.

    Args:
        tp: tensor parallel size.
        ep: expert parallel size.
        rows: number of rows per microbatch on this rank; other ranks may have other numbers.
        dtype: dtype of parameters and tokens.
        to_one: whether every token goes to the first two experts.
        frozen: parts of the names of frozen weights.
        tied: whether the first two local experts share their fc1.
        adapter: whether the first local expert's fc1 is frozen and has a low-rank adapter.
        fusion: whether weight gradients are added to ``main_grad``, with a stand-in for Megatron's kernel.
        graph: whether backward runs; otherwise this is an evaluation.
        expert_tensor_parallel_size: expert tensor parallel size.
        **overrides: config fields that differ from the layer's.
    """
    kind = getattr(torch, dtype)
    cfg = moe.config(
        tp,
        ep,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        **{"params_dtype": kind, "gradient_accumulation_fusion": fusion, **overrides},
    )
    with kernels() if fusion else contextlib.nullcontext():
        built = moe.layer(cfg)
    if to_one:
        routed_to_first(built)
    for name, parameter in _parameters(built).items():
        parameter.requires_grad_(not any(part in name for part in frozen))
    if tied:
        first, second, *_ = built.experts.local_experts
        second.linear_fc1.weight = first.linear_fc1.weight
    if adapter:
        built.experts.local_experts[0].linear_fc1 = Adapter(built.experts.local_experts[0].linear_fc1)
    data = dist.get_rank() // tp  # tensor parallel ranks hold parts of the same sequence
    inputs = [
        moe.tokens(count, seed=100 * data + 10 * index + dist.get_rank() % tp, batch=1, dtype=kind)
        for index, count in enumerate(rows)
    ]
    if not graph:
        with torch.no_grad():
            return {"outputs": [built(each)[0] for each in inputs], "inputs": [], "weights": {}}
    if not fusion:
        return moe.train(built, inputs)
    # Not 0, as after earlier microbatches.
    for parameter in built.parameters():
        parameter.main_grad = torch.ones(parameter.shape)
        parameter.grad_added_to_main_grad = False
    with kernels():
        result = moe.train(built, inputs)
    result["weights"] = {
        f"{name}, in main_grad: {parameter.grad_added_to_main_grad}": parameter.main_grad
        if parameter.grad_added_to_main_grad
        else parameter.grad
        for name, parameter in _parameters(built).items()
    }
    return result


def _parameters(built: Any) -> dict[str, Any]:
    return moe.by_name(built, lambda parameter: parameter)


class Adapter(torch.nn.Module):
    """Frozen linear layer with a trainable low-rank product."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        noise = torch.Generator().manual_seed(5)
        width, size = base.weight.shape
        self.down = torch.nn.Parameter(torch.randn(2, size, generator=noise))
        self.up = torch.nn.Parameter(torch.randn(width, 2, generator=noise))

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        output, _ = self.base(rows)
        return output + rows @ self.down.t() @ self.up.t(), None


def routed_to_first(built: Any) -> None:
    """Route every token to experts 0 and 1, with probabilities that still learn."""
    routing = built.router.routing

    def biased(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return routing(logits + torch.tensor([50.0, 40.0] + [0.0] * (logits.size(-1) - 2)), *args, **kwargs)

    built.router.routing = biased


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Replace Megatron's kernel for gradient accumulation fusion by torch operations."""
    from megatron.core.tensor_parallel import layers

    def accumulate(rows: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(grad_output.t() @ rows)

    kernel = mock.Mock(wgrad_gemm_accum_fp32=accumulate)
    with (
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernel, create=True),
    ):
        yield


def order(frozen: bool = False, switch: Mapping[str, Any] = SWITCH, **overrides: Any) -> dict[str, list[str]]:
    """Return the events of one forward and backward: transfers, expert modules and their weight gradients.

    Args:
        frozen: whether the routed experts are frozen.
        switch: feature switches.
        **overrides: config fields that differ from the layer's.
    """
    model.start(switch, ep=2, etp=1)
    built = moe.layer(moe.config(ep=2, **overrides))
    built.experts.requires_grad_(not frozen)
    with moe.transfers() as events:
        parts = {"expert": built.experts}
        if built.shared_experts is not None:
            parts |= {"shared fc1": built.shared_experts.linear_fc1}
            parts |= {"shared fc2": built.shared_experts.linear_fc2}
        for name, module in parts.items():
            module.register_forward_hook(partial(_happened, events, name))
            for parameter in filter(lambda each: each.requires_grad, module.parameters()):
                parameter.register_post_accumulate_grad_hook(partial(_happened, events, f"{name} dW"))
        output = built(moe.tokens(4, seed=dist.get_rank()).requires_grad_())[0]
        forward, events[:] = list(events), []
        output.sum().backward()
    return {"forward": forward, "backward": events}


def _happened(events: list[str], name: str, *_: Any) -> None:
    events.append(name)


def overlapped_reduction(ep: int, distributed: bool, switch: Mapping[str, Any] = SWITCH) -> dict[str, Any]:
    """Take three steps of two microbatches under DDP with overlapped reduction, stock and ours."""
    model.start(ep=ep, etp=1)
    theirs = _steps(ep, distributed)
    switch_on(switch)
    return {"ours": _steps(ep, distributed), "theirs": theirs}


def _steps(ep: int, distributed: bool) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    cfg = moe.config(ep=ep)
    built = moe.layer(cfg)
    # Small buckets, so that reductions start during backward.
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=distributed,
        bucket_size=2000,
    )
    wrapped = DistributedDataParallel(cfg, ddp, built)
    gradients: dict[str, Tensor] = {}
    for step in range(3):
        wrapped.zero_grad_buffer()
        for index in range(2):
            each = moe.tokens(5, seed=10 * step + index + 100 * dist.get_rank()).requires_grad_()
            with wrapped.no_sync() if index == 0 else contextlib.nullcontext():
                built(each)[0].square().sum().backward()
        wrapped.finish_grad_sync()
        for name, parameter in _parameters(built).items():
            gradients[f"{name}, step {step}"] = parameter.main_grad.clone()
    names = {parameter: name for name, parameter in _parameters(built).items()}
    groups = [*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups]
    # Gradients per weight, which Megatron counts in the first step.
    golden = {
        names[parameter]: count
        for group in groups
        for parameter, count in group.golden_per_param_grad_ready_counts.items()
    }
    return {"gradients": gradients, "golden": golden}


def whole_model(**arguments: Any) -> dict[str, Any]:
    """Run a training step of the tiny model; also return the number of transfers started."""
    with moe.transfers() as events:
        result = model.run(**arguments)
    return {**result, "launched": events.count("launch")}
