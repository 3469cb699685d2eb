"""Decorators of Megatron's linear layers, which decide for each call whether and how to overlap."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.tensor_parallel.overlap import tuning
from mindspeed_dsa.features.tensor_parallel.overlap.autograd import (
    Column,
    Plan,
    Row,
    column_backward,
    flat,
    row_backward,
)
from mindspeed_dsa.features.tensor_parallel.overlap.feature import Options, check_tuned
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.parallel.weight_gradients import WeightGradient


def overlap_column_parallel(
    original: Callable[..., Tensor], context: Context[Options]
) -> Callable[..., Tensor]:
    """Decorate Megatron's linear functions for trainable and for frozen weights, to overlap communication.

    Column parallel layers call these functions, and so does code that passes a weight, such as tied
    embeddings.
    """
    beyond = tuple(inspect.signature(original).parameters)[_COMMON:]

    def linear(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        plan = None
        others = {**dict(zip(beyond, args, strict=False)), **kwargs}
        # Any other argument requests something that only Megatron's own function supports, such as the
        # deferred weight gradient of the embedding.
        duties = [name for name, value in others.items() if value is not None and name not in _PASSIVE]
        if (sequence_parallel or allreduce_dgrad) and not duties:
            group = _group_of(others.get("tp_group"), context)
            plan = _column_plan(
                input, weight, group, sequence_parallel, gradient_accumulation_fusion, context
            )
        if plan is None:
            return original(
                input,
                weight,
                bias,
                gradient_accumulation_fusion,
                allreduce_dgrad,
                sequence_parallel,
                *args,
                **kwargs,
            )
        output: Tensor = Column.apply(input, weight, bias, plan)
        return output

    return linear


_ANY = 1e-3
"""Value of output gradients for timing; the duration of a matmul does not depend on values."""
_COMMON = 6
"""Number of parameters that both functions take in every release."""
_PASSIVE = ("tp_group", "wgrad_deferral_limit", "gtp_remat_size")
"""Other parameters that need no support here; for ``gtp_remat_size`` see :func:`_is_plain`."""


def overlap_row_parallel(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``RowParallelLinear.forward`` to overlap its matmul with the reduction."""
    # Megatron's forward runs on a proxy of the layer whose product is already reduced over ranks.

    def forward(self: Any, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = None
        if not self.explicit_expert_comm and not args and not kwargs:
            group = _group_of(getattr(self, "tp_group", None), context)
            plan = _row_plan(self, input_, group, context)
        if plan is None:
            return original(self, input_, *args, **kwargs)
        output, bias = original(_Reduced(self, plan), input_)
        if self.skip_bias_add:
            return output, bias
        return (output if bias is None else output + bias), None

    return forward


class _Reduced:
    """Proxy of a row parallel layer that hides reduction and bias, which the caller handles."""

    explicit_expert_comm = True
    skip_bias_add = True

    def __init__(self, layer: Any, plan: Plan) -> None:
        vars(self).update(_layer=layer, _plan=plan)  # bypasses __setattr__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_forward_impl":  # before megatron-core 0.14 every forward assigns it
            setattr(self._layer, name, value)

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        output: Tensor = Row.apply(input, weight, self._plan)
        return output


def _group_of(group: Any, context: Context[Options]) -> Any:
    if group is not None:
        return group
    return context.megatron("core.parallel_state").get_tensor_model_parallel_group()


def _is_plain(input: Tensor, weight: Tensor, group: Any) -> bool:
    """Return whether the overlap supports a matmul: ordinary tensors of one dtype, and several ranks."""
    return (
        group.size() > 1
        and input.dim() >= 2
        and input.numel() > 0
        and input.dtype == weight.dtype
        and input.is_floating_point()
        and not hasattr(weight, "__fsdp_param__")
        and not hasattr(weight, "all_gather_and_prefetch")
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
    )


def _column_plan(
    input: Tensor,
    weight: Tensor,
    group: Any,
    sequence_parallel: bool,
    fusion: bool,
    context: Context[Options],
) -> Plan | None:
    """Return the communication settings of this call, or ``None`` to run Megatron's own code."""
    if not _is_plain(input, weight, group):
        return None
    plan = _plan(context, group, sequence_parallel, fusion)
    if context.options.fused:
        return plan if sequence_parallel and _taken(plan, weight, context) else None
    if plan.forward == 0:
        plan = _tuned_column(plan, input, weight, context)
    if plan.forward == plan.backward == 1 and not plan.keep_gathered:
        return None  # the same as Megatron's own code
    return plan


def _row_plan(layer: Any, input: Tensor, group: Any, context: Context[Options]) -> Plan | None:
    weight = layer.weight
    usual = context.megatron("core.tensor_parallel.layers").RowParallelLinear
    if getattr(type(layer), "_forward_impl", None) is not getattr(usual, "_forward_impl", None):
        return None  # a custom matmul, such as a quantized one
    if not _is_plain(input, weight, group):
        return None
    ranks, width = group.size(), weight.size(1)
    parallel = layer.input_is_parallel
    if input.size(-1) != (width if parallel else width * ranks):
        return None  # Megatron reports this problem and the next one
    if layer.sequence_parallel and input.size(0) % ranks:
        return None
    plan = _plan(context, group, layer.sequence_parallel, layer.gradient_accumulation_fusion)
    plan = replace(plan, keep_gathered=False)
    if context.options.fused:
        return plan if plan.sequence_parallel and _taken(plan, weight, context) else None
    if plan.forward == 0:
        require(context, check_tuned, layer.config)
        # Megatron's forward scatters a full input later, so take this rank's part for tuning.
        mine = input if parallel else input.narrow(-1, group.rank() * width, width)
        plan = _tuned_row(plan, mine, weight, context)
    if plan.forward == 1 and (plan.backward == 1 or not plan.sequence_parallel):
        return None
    return plan


def _plan(context: Context[Options], group: Any, sequence_parallel: bool, fusion: bool) -> Plan:
    wanted = context.options
    return Plan(
        backend=wanted.module,
        group=group,
        megatron=context.megatron,
        sequence_parallel=sequence_parallel,
        forward=1 if wanted.fused else wanted.chunks,
        backward=1 if wanted.fused else wanted.chunks,
        keep_gathered=wanted.keep_gathered and sequence_parallel,
        fusion=fusion,
    )


def _taken(plan: Plan, weight: Tensor, context: Context[Options]) -> bool:
    """Return whether the fused operators support this layer; if not, log the reason once."""
    reason = plan.backend.declines(weight, plan.group)
    if reason:
        text = "layers run Megatron's own code, because the fused operators do not support them: %s"
        context.log.info(text, reason, once=True, ranks="stage")
    return not reason


def _tuned_column(plan: Plan, input: Tensor, weight: Tensor, context: Context[Options]) -> Plan:
    """Return the plan with the fastest numbers of chunks for forward and backward at these sizes."""
    (n, k), group, backend = weight.shape, plan.group, plan.backend
    ranks = group.size() if plan.sequence_parallel else 1
    m, choices = input.numel() // k * ranks, context.state(tuning.Tuning)  # rows after the gather

    def forward() -> tuning.Run:
        rows, matrix = flat(input.detach()), weight.detach().t()
        return lambda chunks: backend.gather_matmul(rows, matrix, group, chunks, plan.passing(rows))

    def backward() -> tuning.Run:
        rows = flat(input.detach())
        saved = rows.repeat(ranks, 1) if plan.keep_gathered else rows
        grad, matrix, gradient = rows.new_full((m, n), _ANY), weight.detach(), _scratch(weight, saved, plan)
        return lambda chunks: column_backward(matrix, grad, replace(plan, backward=chunks), gradient())

    plan = replace(plan, forward=1, backward=1)
    if plan.sequence_parallel:
        problem = _problem("column forward", plan, weight, m, k, n)
        plan = replace(plan, forward=choices.chunks_for(problem, group, forward))
    if torch.is_grad_enabled() and _can_measure_gradient(plan, weight):
        problem = _problem("column backward", plan, weight, m, n, k)
        plan = replace(plan, backward=choices.chunks_for(problem, group, backward))
    return plan


def _tuned_row(plan: Plan, input: Tensor, weight: Tensor, context: Context[Options]) -> Plan:
    (n, k), group, backend = weight.shape, plan.group, plan.backend
    m, choices = input.numel() // k, context.state(tuning.Tuning)

    def forward() -> tuning.Run:
        rows, matrix = flat(input.detach()), weight.detach().t()
        start = backend.matmul_scatter if plan.sequence_parallel else backend.matmul_reduce
        return lambda chunks: start(rows, matrix, group, chunks).wait()

    def backward() -> tuning.Run:
        matrix, gradient = weight.detach(), _scratch(weight, flat(input.detach()), plan)
        # Under sequence parallelism each rank has its share of the output's rows.
        grad = matrix.new_full((m // group.size(), n), _ANY)
        return lambda chunks: row_backward(matrix, grad, replace(plan, backward=chunks), gradient())

    problem = _problem("row forward", plan, weight, m, k, n)
    plan = replace(plan, forward=choices.chunks_for(problem, group, forward), backward=1)
    if plan.sequence_parallel and torch.is_grad_enabled() and _can_measure_gradient(plan, weight):
        problem = _problem("row backward", plan, weight, m, n, k)
        plan = replace(plan, backward=choices.chunks_for(problem, group, backward))
    return plan


def _problem(kind: tuning.Kind, plan: Plan, weight: Tensor, m: int, k: int, n: int) -> tuning.Problem:
    return tuning.Problem(
        kind=kind,
        sequence_parallel=plan.sequence_parallel,
        m=m,
        k=k,
        n=n,
        learns=weight.requires_grad,
        dtype=weight.dtype,
        device=weight.device.type,
        ranks=tuple(dist.get_process_group_ranks(plan.group)),
        variant=f"{plan.backend.__name__}, kept {plan.keep_gathered}, fused {plan.fusion}",
    )


def _can_measure_gradient(plan: Plan, weight: Tensor) -> bool:
    """Return whether the weight's gradient buffer exists, which timing the backward needs."""
    # Before DDP wraps the model there is no `main_grad`. This backward then communicates as stock, and a
    # later call is tuned.
    return not (plan.fusion and weight.requires_grad) or getattr(weight, "main_grad", None) is not None


def _scratch(weight: Tensor, rows: Tensor, plan: Plan) -> Callable[[], WeightGradient | None]:
    """Return a function that creates throwaway weight gradient accumulators for timing."""
    if not weight.requires_grad:
        return lambda: None
    main_grad = getattr(weight, "main_grad", None) if plan.fusion else None
    aside = None if main_grad is None else torch.zeros_like(main_grad)
    return lambda: WeightGradient(weight.detach(), rows, aside, plan.fusion, plan.megatron)
