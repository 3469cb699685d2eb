"""Weight gradients of linear layers, accumulated into ``main_grad`` or deferred to a later time.

:class:`WeightGradient` computes one gradient, in one or several matmuls.

A *deferred* gradient is computed by its own autograd node, inserted between the weight and the functions that
use the weight. Autograd runs ready nodes in the reverse order of their creation, so the point of creation in
forward determines the time in backward. A node created between the start and the wait of a transfer overlaps
with the reverse transfer. The weight's ``AccumulateGrad`` and its data parallel hooks run after the node, as
often as without deferral.

A function supports deferral in three steps::

    deferred = deferred_gradient_of(weight)                     # in forward: None if it is not deferred
    output = Function.apply(rows, deferred.edge, deferred)      # the edge replaces the weight in the graph
    return grad_rows, deferred.defer(gradient), None            # in its backward, for the edge

:func:`defer_in_linear` does this for Megatron's own linear layers. A :class:`QueuedGradient` has no node: it
is put in a queue, and computed after the backward has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.patches.compose import depends_on

# -- gradients ---------------------------------------------------------------------------------


class WeightGradient:
    """Gradient of a linear layer's weight, summed over the rows of all calls of :meth:`add`.

    Args:
        weight: parameter, ``[out, in]``.
        rows: layer's input as saved for backward, ``[rows, in]``, contiguous.
        main_grad: gradient buffer, ``[out, in]``, or ``None``.
        fusion: Megatron's ``gradient_accumulation_fusion``: fused kernels accumulate into ``main_grad``.
        megatron: accessor of Megatron's modules, for the fused kernels.
    """

    def __init__(
        self, weight: Tensor, rows: Tensor, main_grad: Tensor | None, fusion: bool, megatron: Megatron
    ) -> None:
        self._weight, self.rows, self._fusion = weight, rows, fusion
        if fusion and main_grad is not None:
            # A weight shared by several layers may have lost its main_grad since the forward.
            self._weight.main_grad = main_grad  # type: ignore[attr-defined]
        self._sum: Tensor | None = None
        self._megatron = megatron

    @property
    def in_pieces(self) -> bool:
        """Return whether several calls of :meth:`add` are as accurate as one: sums are fp32 or wider."""
        target: Tensor = self._weight.main_grad if self._fusion else self._weight  # type: ignore[attr-defined]
        return target.dtype in (torch.float32, torch.float64)

    def add(self, grad_output: Tensor, rows: Tensor) -> None:
        """Add the gradient of some rows, ``grad_output.T @ rows``.

        Args:
            grad_output: gradient of the output, ``[rows, out]``, contiguous.
            rows: input, ``[rows, in]``, contiguous.
        """
        if self._fusion:
            self._add_to_main_grad(grad_output, rows)
        elif self._sum is None:
            self._sum = torch.mm(grad_output.t(), rows)
        else:
            torch.addmm(self._sum, grad_output.t(), rows, out=self._sum)

    def _add_to_main_grad(self, grad_output: Tensor, rows: Tensor) -> None:
        layers = self._megatron("core.tensor_parallel.layers")
        main_grad = self._weight.main_grad  # type: ignore[attr-defined]
        if main_grad.dtype == torch.float32:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(rows, grad_output, main_grad)
        elif main_grad.dtype in (torch.float16, torch.bfloat16):
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(rows, grad_output, main_grad)
        else:
            raise RuntimeError(
                f"gradient accumulation fusion takes main_grad in fp32, fp16 or bf16, not {main_grad.dtype}; "
                "use --no-gradient-accumulation-fusion"
            )

    def result(self, dtype: torch.dtype) -> Tensor | None:
        """Return the weight's gradient for autograd: the sum, or a placeholder if it is in ``main_grad``."""
        if not self._fusion:
            return self._sum
        return placeholder(self._weight, dtype, self._megatron)


def placeholder(weight: Any, dtype: torch.dtype, megatron: Megatron) -> Tensor | None:
    """Return the gradient for autograd of a weight whose real gradient is already in ``main_grad``.

    With Megatron's DDP (the weight has ``grad_added_to_main_grad``) this is a dummy tensor, so that the
    gradient hooks run; otherwise ``None``.

    Args:
        weight: parameter; its ``grad_added_to_main_grad`` is set.
        dtype: dtype of the placeholder.
        megatron: accessor of Megatron's modules; releases with ``get_dummy_wgrad`` share one placeholder.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zero = bool(getattr(weight, "zero_out_wgrad", False))
    layers = megatron("core.tensor_parallel.layers")
    shared = getattr(layers, "get_dummy_wgrad", None)
    if shared is not None:
        dummy: Tensor = shared(list(weight.main_grad.shape), dtype, zero=zero)
        return dummy
    make = torch.zeros if zero else torch.empty
    return make(weight.main_grad.shape, dtype=dtype, device=weight.device)


# -- deferred gradients ------------------------------------------------------------------------

Gradient = Callable[[], "Tensor | None"]
"""Function that returns the weight's gradient, or a placeholder or ``None`` if it added to ``main_grad``."""


class DeferredGradient:
    """Deferred gradient of one weight, for one forward and its backward.

    Attributes:
        weight: parameter of any shape.
        taken: whether a function has requested the deferral with :func:`deferred_gradient_of`.
        edge: empty tensor that replaces the weight in the autograd graph.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.taken = False
        self._gradients: list[Gradient] = []
        self.edge: Tensor = _Deferral.apply(weight, self._gradients)

    def defer(self, gradient: Gradient, operands: Iterable[Tensor] = ()) -> Tensor:
        """Store a function that computes the gradient later. Several gradients of the weight are summed.

        Args:
            gradient: function that computes the gradient.
            operands: tensors that ``gradient`` keeps alive.

        Returns:
            Gradient for :attr:`edge`, ``[0]``, for the caller's backward to return.
        """
        self._gradients.append(gradient)
        return self.weight.new_empty(0)

    def is_in(self, queue: MutableSequence[Queued] | None) -> bool:
        """Return whether the gradient goes to ``queue``; False, as this class uses no queue."""
        return False


class Queued(NamedTuple):
    """Weight gradient that backward did not compute, with the function that computes it."""

    weight: Tensor
    gradient: Gradient
    operands: tuple[Tensor, ...]


class QueuedGradient(DeferredGradient):
    """Deferred gradient without an autograd node: backward puts it in a queue and ignores the weight.

    Args:
        weight: parameter.
        queue: queue to which the gradient is appended. The queue's owner computes it and adds it to the
            weight.
    """

    def __init__(self, weight: Tensor, queue: MutableSequence[Queued]) -> None:
        self.weight, self.taken = weight, False
        # A leaf: backward of the function runs, but nothing is accumulated into the weight.
        self.edge = weight.new_empty(0).requires_grad_()
        self._queue = queue

    def defer(self, gradient: Gradient, operands: Iterable[Tensor] = ()) -> Tensor:
        """Append the gradient to the queue."""
        self._queue.append(Queued(self.weight, gradient, tuple(operands)))
        return self.weight.new_empty(0)

    def is_in(self, queue: MutableSequence[Queued] | None) -> bool:
        """Return whether the gradient goes to ``queue``."""
        return self._queue is queue


class _Deferral(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradients: list[Gradient]) -> Tensor:
        ctx.gradients = gradients
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        while ctx.gradients:
            gradient = ctx.gradients.pop(0)()  # its operands are released right after
            if gradient is not None:  # None: it is in main_grad
                total = gradient if total is None else total + gradient
        return total, None


_deferred: ContextVar[Mapping[int, DeferredGradient]] = ContextVar("deferred", default=MappingProxyType({}))


@contextlib.contextmanager
def defer_gradients(
    weights: Iterable[Tensor], make: Callable[[Tensor], DeferredGradient] = DeferredGradient
) -> Iterator[Collection[DeferredGradient]]:
    """Context manager that defers the gradients of ``weights`` in functions called inside.

    Frozen weights are ignored. A weight for which no function requests the deferral gets its gradient as
    usual.

    Args:
        weights: parameters.
        make: constructor of a deferred gradient from its weight.
    """
    learning = [weight for weight in weights if weight.requires_grad] if torch.is_grad_enabled() else []
    made = {id(weight): make(weight) for weight in learning}
    # Added to the weights that enclosing blocks defer.
    token = _deferred.set({**_deferred.get(), **made})
    try:
        yield made.values()
    finally:
        _deferred.reset(token)


_queue: ContextVar[MutableSequence[Queued] | None] = ContextVar("queue of gradients", default=None)


@contextlib.contextmanager
def queue_gradients(weights: Iterable[Tensor], queue: MutableSequence[Queued]) -> Iterator[None]:
    """Context manager that queues the weight gradients of functions called inside.

    Args:
        weights: parameters; :func:`also_queued` adds more.
        queue: queue to which backward appends the gradients.
    """
    token = _queue.set(queue)
    try:
        with also_queued(weights):
            yield
    finally:
        _queue.reset(token)


def also_queued(weights: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Context manager: inside :func:`queue_gradients`, queue the gradients of more weights too."""
    queue = _queue.get()
    if queue is None:
        return contextlib.nullcontext()
    return defer_gradients(weights, lambda weight: QueuedGradient(weight, queue))


def are_queued() -> bool:
    """Return whether :func:`queue_gradients` is active."""
    return _queue.get() is not None


def queueing_of_now() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that creates a context manager which restores the present queue, or no queue.

    Recomputation in backward uses it, because another forward's queue may be active by then.
    """
    queue = _queue.get()
    if queue is None:
        return _nothing_queued
    weights = [each.weight for each in _deferred.get().values() if isinstance(each, QueuedGradient)]
    return partial(queue_gradients, weights, queue)


@contextlib.contextmanager
def _nothing_queued() -> Iterator[None]:
    deferred, queue = _deferred.get(), _queue.get()
    tokens = (
        _queue.set(None),
        _deferred.set({key: each for key, each in deferred.items() if not each.is_in(queue)}),
    )
    try:
        yield
    finally:
        _queue.reset(tokens[0])
        _deferred.reset(tokens[1])


def queued_as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that is called later, so that it uses the queue that is active now."""
    as_now = queueing_of_now()

    def queueing(*args: Any, **kwargs: Any) -> Any:
        with as_now():
            return function(*args, **kwargs)

    return queueing


def deferred_gradient_of(weight: Tensor) -> DeferredGradient | None:
    """Request the deferral of a weight's gradient; return ``None`` if it is not deferred."""
    deferred = _deferred.get().get(id(weight))
    if deferred is not None:
        deferred.taken = True
    return deferred


def queued_gradient_of(weight: Tensor) -> QueuedGradient | None:
    """Return the queued gradient of a weight, to which more can be added; ``None`` if it is not queued."""
    deferred = _deferred.get().get(id(weight))
    return deferred if isinstance(deferred, QueuedGradient) else None


def is_deferred(weight: Tensor) -> bool:
    """Return whether :func:`deferred_gradient_of` would return a gradient, without requesting it."""
    return id(weight) in _deferred.get()


# -- linear layers -----------------------------------------------------------------------------


@depends_on(attrgetter("megatron"))
def defer_in_linear(original: Callable[..., Tensor], context: Context[Any]) -> Callable[..., Tensor]:
    """Wrap ``linear_with_grad_accumulation_and_async_allreduce`` to defer weight gradients where requested.

    Several features list this patch; the engine applies it once.
    """

    def linear(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        # Megatron's own code serves layers that communicate, unless gradients are queued, and layers that
        # defer gradients themselves or compute in another dtype.
        alone = not (allreduce_dgrad or sequence_parallel) or _queue.get() is not None
        plain = (
            alone
            and grad_output_buffer is None
            and kwargs.get("gtp_remat_size", 1) == 1
            and _is_plain(input, weight)
        )
        deferred = deferred_gradient_of(weight) if plain else None
        if deferred is None:
            return original(
                input,
                weight,
                bias,
                gradient_accumulation_fusion,
                allreduce_dgrad,
                sequence_parallel,
                grad_output_buffer,
                *args,
                **kwargs,
            )
        ranks = TensorRanks(context.megatron, kwargs.get("tp_group"), allreduce_dgrad, sequence_parallel)
        return linear_later(input, bias, deferred, context.megatron, gradient_accumulation_fusion, ranks)

    return linear


class TensorRanks:
    """Communication of a linear layer with the other tensor parallel ranks, through Megatron's functions.

    Args:
        megatron: accessor of Megatron's modules.
        group: process group; ``None`` for Megatron's tensor parallel group.
        sums: whether input gradients are partial sums, as in a column parallel layer.
        gathers: whether inputs are sequence shards, as under sequence parallelism.
    """

    def __init__(self, megatron: Megatron, group: Any, sums: bool, gathers: bool) -> None:
        self._mappings, self._gathers, self._sums = None, gathers, sums and not gathers
        if sums or gathers:
            self._mappings = megatron("core.tensor_parallel.mappings")
            self._group = group or megatron("core.parallel_state").get_tensor_model_parallel_group()

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather this rank's shard ``[rows, ..., in]`` to the whole sequence."""
        if not self._gathers or self._mappings is None:
            return rows
        whole: Tensor = self._mappings._gather_along_first_dim(rows, self._group)
        return whole

    def reduce(self, grad_rows: Tensor) -> Tensor:
        """Sum the input gradient over the ranks; under sequence parallelism, return this rank's shard."""
        if self._mappings is None:
            return grad_rows
        if self._gathers:
            part: Tensor = self._mappings._reduce_scatter_along_first_dim(grad_rows, self._group)
            return part
        if self._sums:
            torch.distributed.all_reduce(grad_rows, group=self._group)
        return grad_rows


def _is_plain(input: Tensor, weight: Tensor) -> bool:
    return (
        weight.dim() == 2
        and input.dtype == weight.dtype
        and not hasattr(weight, "__fsdp_param__")
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
    )


def linear_later(
    rows: Tensor,
    bias: Tensor | None,
    deferred: DeferredGradient,
    megatron: Megatron,
    fusion: bool = False,
    ranks: TensorRanks | None = None,
) -> Tensor:
    """Return ``rows @ weight.T + bias`` with the weight gradient deferred.

    ``rows`` and the output's gradient are kept until the weight gradient is computed. Under sequence
    parallelism only this rank's shard of ``rows`` is kept, and gathered again.

    Args:
        rows: input, ``[..., in]``.
        bias: bias, ``[out]``, or ``None``.
        deferred: deferred gradient of the weight ``[out, in]``.
        megatron: accessor of Megatron's modules, for its gradient conventions.
        fusion: Megatron's ``gradient_accumulation_fusion``.
        ranks: communication with the tensor parallel ranks of the layer; default: none.
    """
    ranks = ranks or TensorRanks(megatron, None, False, False)
    output: Tensor = _Linear.apply(rows, deferred.edge, bias, deferred, fusion, megatron, ranks)
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        edge: Tensor,
        bias: Tensor | None,
        deferred: DeferredGradient,
        fusion: bool,
        megatron: Megatron,
        ranks: TensorRanks,
    ) -> Tensor:
        ctx.save_for_backward(rows, deferred.weight)
        ctx.deferred, ctx.fusion, ctx.megatron, ctx.ranks = deferred, fusion, megatron, ranks
        ctx.main_grad = getattr(deferred.weight, "main_grad", None) if fusion else None
        output = torch.matmul(ranks.gather(rows), deferred.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        ranks = ctx.ranks
        grad_rows = ranks.reduce(grad_output.matmul(weight)) if ctx.needs_input_grad[0] else None
        # [tokens, out]
        flat, dtype = grad_output.reshape(-1, grad_output.size(-1)).contiguous(), rows.dtype
        grad_bias = flat.sum(dim=0) if ctx.needs_input_grad[2] else None
        parameter, main_grad, fusion, megatron = ctx.deferred.weight, ctx.main_grad, ctx.fusion, ctx.megatron

        def gradient() -> Tensor | None:
            # It runs on the step's stream, and its operands may be of the second stream.
            platform = platforms.current()
            for operand in (rows, flat):
                if operand.device.type == platform.device_type:
                    platform.record_stream(operand, platform.current_stream())
            whole = ranks.gather(rows)
            saved = whole.reshape(-1, whole.size(-1)).contiguous()
            total = WeightGradient(parameter, saved, main_grad, fusion, megatron)
            total.add(flat, saved)
            return total.result(dtype)

        token = ctx.deferred.defer(gradient, (rows, flat))
        return grad_rows, token, grad_bias, None, None, None, None
