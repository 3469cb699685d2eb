"""MoE token permutation: group tokens by the experts to which they are routed, and undo it.

README.md in this folder defines the rows and their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.ops import checks
from mindspeed_dsa.ops.backend import ShapeClass, choose, plan, unless_empty
from mindspeed_dsa.ops.checks import check_float, check_shape, require
from mindspeed_dsa.ops.moe_permute.backends import GradientPermuter, Permuter
from mindspeed_dsa.ops.precision import outside_autocast, without_autocast

OPERATOR = "moe_permute"

if TYPE_CHECKING:  # mypy checks the module against the protocol
    from mindspeed_dsa.ops.moe_permute import triton

    MODULE: Permuter = triton


class Permuted(NamedTuple):
    """Tokens and probabilities permuted for the experts, and the map that :func:`unpermute` needs."""

    tokens: Tensor
    """``[rows, hidden]``: grouped by expert, in the order of the tokens within each expert."""
    probs: Tensor | None
    """``[rows]``, in the dtype of the probabilities, or None without them."""
    row_map: Tensor
    """``[n]`` int32, argument of :func:`unpermute`; its layout is :class:`row_map.RowMap`'s."""


@outside_autocast
def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    *,
    rows: int | None = None,
    topk: int | None = None,
    backend: str = "auto",
) -> Permuted:
    """Copy every token once for each expert to which it is routed, grouped by expert.

    Result and gradients depend only on the inputs, bit for bit. A token's gradient is the sum over its rows
    in ascending order of experts, in fp32 for 16-bit tokens.

    Args:
        tokens: ``[tokens, hidden]``; fp32, bf16, fp16 or fp64.
        routing_map: ``[tokens, experts]`` bool. A token may go to any number of experts, or to none.
        probs: ``[tokens, experts]`` in any floating dtype, or None.
        rows: number of True entries of the map, if the caller knows it. Otherwise they are counted, which
            takes a synchronization on accelerators. Backends that read the map on the host raise an error if
            the number is wrong. With other backends, a number that is too small drops the last rows. One that
            is too large gives excess rows of zeros, or copies of arbitrary tokens with plain PyTorch.
        topk: number of experts of every token, if the caller guarantees that it is the same for all; backends
            that rely on it run only if it is given.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        :class:`Permuted`.

    Raises:
        ValueError: a shape, dtype or count does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    check_shape(OPERATOR, "tokens", tokens, (None, None), "[tokens, hidden]")
    check_float(OPERATOR, tokens=tokens)
    count = len(tokens)
    check_shape(OPERATOR, "routing_map", routing_map, (count, None), f"[{count}, experts]")
    require(
        routing_map.dtype == torch.bool and routing_map.device == tokens.device,
        OPERATOR,
        f"routing_map must be bool on {tokens.device}, got {routing_map.dtype} on {routing_map.device}",
    )
    require(
        routing_map.numel() < 1 << 31,
        OPERATOR,
        f"{list(routing_map.shape)} tokens and experts need more than 31 bits; split the batch",
    )
    if probs is not None:
        _check_probs(probs, tokens, tuple(routing_map.shape))
    if rows is not None and checks.enabled():
        entries = int(routing_map.sum())
        require(
            rows == entries,
            OPERATOR,
            f"the routing map sends its {count} tokens to {entries} rows in all, and the caller says {rows}; "
            "num_out_tokens must count the entries of the map",
        )
    if topk is not None and checks.enabled():
        require(
            bool((routing_map.sum(1) == topk).all()),
            OPERATOR,
            f"the caller says that every token goes to {topk} experts, and the map says otherwise",
        )
    selected: Permuter = choose(OPERATOR, backend, _shape_class(tokens))
    selected = unless_empty(OPERATOR, selected, tokens, routing_map)
    implementation, _ = plan(OPERATOR, backend, selected, selected.plan_permute(tokens, probs, topk))
    if implementation.KIND == "autograd":
        return Permuted(*implementation.permute(tokens, routing_map, probs, rows, topk))
    return Permuted(*_Permute.apply(implementation, tokens, probs, routing_map, rows, topk))


@outside_autocast
def unpermute(
    permuted: Tensor,
    row_map: Tensor,
    tokens: int,
    probs: Tensor | None = None,
    *,
    addend: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return, for every token, the optionally weighted sum of its rows, plus an optional addend.

    ``out[t] = sum_e probs[t, e] * permuted[row(t, e)] + addend[t]``, in ascending order of experts, summed in
    fp32 for 16-bit rows. A token without rows gets zeros, or its addend.

    Args:
        permuted: ``[rows, hidden]``, in the order of :func:`permute`'s result.
        row_map: map from :func:`permute`.
        tokens: number of tokens before the permutation.
        probs: ``[tokens, experts]`` in any floating dtype, or None.
        addend: ``[tokens, hidden]`` in the dtype of ``permuted``, such as a shared expert's output, or None.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``permuted``.

    Raises:
        ValueError: a shape or dtype does not fit, or the map belongs to another permutation.
        BackendUnavailable: the requested backend cannot take the call.
    """
    check_shape(OPERATOR, "permuted", permuted, (None, None), "[rows, hidden]")
    check_float(OPERATOR, permuted=permuted)
    require(
        row_map.dim() == 1 and row_map.dtype == torch.int32 and row_map.device == permuted.device,
        OPERATOR,
        f"row_map must be what permute returned, one axis of int32 on {permuted.device}, got "
        f"{list(row_map.shape)} of {row_map.dtype} on {row_map.device}",
    )
    rows, hidden = permuted.shape
    if probs is not None:
        _check_probs(probs, permuted, (tokens, None))
    if addend is not None:
        check_shape(OPERATOR, "addend", addend, (tokens, hidden), f"[{tokens}, {hidden}]")
        check_float(OPERATOR, permuted=permuted, addend=addend)
    selected: Permuter = choose(OPERATOR, backend, _shape_class(permuted))
    selected = unless_empty(OPERATOR, selected, permuted)
    implementation, _ = plan(OPERATOR, backend, selected, selected.plan_unpermute(row_map, rows, probs))
    if implementation.KIND == "autograd":
        return implementation.unpermute(permuted, row_map, tokens, probs, addend)
    return _Unpermute.apply(implementation, permuted, row_map, tokens, probs, addend)


@outside_autocast
def sort_chunks(
    input: Tensor, split_sizes: Tensor, order: Tensor, probs: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Split rows into chunks and reorder the chunks.

    On CPUs the input itself is returned if the chunks are already in order.

    Args:
        input: ``[rows, hidden]``.
        split_sizes: ``[chunks]`` int, rows of each chunk; their sum is ``rows``.
        order: ``[chunks]`` int, permutation: ``order[i]`` is the chunk that becomes chunk ``i``.
        probs: ``[rows]`` in any floating dtype, reordered alike, or None.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        Input and probabilities in the new order; the latter None if not given.

    Raises:
        ValueError: a shape or dtype does not fit.
        BackendUnavailable: the requested backend cannot take the call.
    """
    check_shape(OPERATOR, "input", input, (None, None), "[rows, hidden]")
    check_float(OPERATOR, input=input)
    check_shape(OPERATOR, "split_sizes", split_sizes, (None,), "[chunks]")
    check_shape(OPERATOR, "order", order, tuple(split_sizes.shape), f"[{len(split_sizes)}], as split_sizes")
    if probs is not None:
        _check_probs(probs, input, (len(input),))
    if order.device.type == "cpu" and order.equal(torch.arange(len(order), dtype=order.dtype)):
        return input, probs
    selected: Permuter = choose(OPERATOR, backend, _shape_class(input))
    implementation = unless_empty(OPERATOR, selected, input)
    tensors = [input] if probs is None else [input, probs]
    if implementation.KIND == "autograd":
        moved = implementation.sort_chunks(tensors, split_sizes, order)
    else:
        moved = _SortChunks.apply(implementation, split_sizes, order, *tensors)
    return moved[0], None if probs is None else moved[1]


def _check_probs(probs: Tensor, tokens: Tensor, shape: tuple[int | None, ...]) -> None:
    check_shape(OPERATOR, "probs", probs, shape, f"{list(shape)}")
    require(
        probs.is_floating_point() and probs.device == tokens.device,
        OPERATOR,
        f"probs must be floating point on {tokens.device}, got {probs.dtype} on {probs.device}",
    )


def _shape_class(tokens: Tensor) -> ShapeClass:
    return ShapeClass.of(tokens, ("hidden", tokens.shape[1]))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: GradientPermuter,
        tokens: Tensor,
        probs: Tensor | None,
        routing_map: Tensor,
        rows: int | None,
        topk: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        permuted, permuted_probs, row_map = implementation.permute(tokens, routing_map, probs, rows, topk)
        ctx.implementation = implementation
        ctx.save_for_backward(row_map, routing_map)
        ctx.mark_non_differentiable(row_map)
        ctx.set_materialize_grads(False)
        return permuted, permuted_probs, row_map

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_permuted: Tensor | None, grad_probs: Tensor | None, _: Tensor | None
    ) -> tuple[Any, ...]:
        # Skip gradients of inputs that need none.
        wanted = [
            grad if need else None
            for grad, need in zip((grad_permuted, grad_probs), ctx.needs_input_grad[1:3], strict=True)
        ]
        first = next((grad for grad in wanted if grad is not None), None)
        if first is None:
            return (None,) * 6
        with without_autocast(first.device.type):
            grads = ctx.implementation.permute_gradients(*wanted, *ctx.saved_tensors)
        return (None, *grads, None, None, None)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: GradientPermuter,
        permuted: Tensor,
        row_map: Tensor,
        tokens: int,
        probs: Tensor | None,
        addend: Tensor | None,
    ) -> Tensor:
        ctx.implementation, ctx.rows, ctx.adds = implementation, len(permuted), addend is not None
        # Without weights the rows are not needed for the gradient.
        ctx.save_for_backward(row_map, None if probs is None else permuted, probs)
        return implementation.unpermute(permuted, row_map, tokens, probs, addend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        row_map, permuted, probs = ctx.saved_tensors
        grad_permuted = grad_probs = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[4]:
            with without_autocast(grad.device.type):
                grad_permuted, grad_probs = ctx.implementation.unpermute_gradients(
                    grad, row_map, ctx.rows, permuted, probs
                )
        return None, grad_permuted, None, None, grad_probs, grad if ctx.adds else None


class _SortChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, implementation: GradientPermuter, split_sizes: Tensor, order: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.implementation = implementation
        ctx.save_for_backward(split_sizes, order)
        ctx.set_materialize_grads(False)
        return implementation.sort_chunks(tensors, split_sizes, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        split_sizes, order = ctx.saved_tensors
        present = [grad for grad in grads if grad is not None]
        if not present:
            return (None,) * (3 + len(grads))
        # Inverse permutation by a scatter, without a sort of integers.
        place = torch.arange(len(order), dtype=order.dtype, device=order.device)
        back = torch.empty_like(order).index_copy_(0, order.long(), place)  # [chunks]
        sizes = split_sizes.index_select(0, order.to(split_sizes.device))
        moved = iter(ctx.implementation.sort_chunks(present, sizes, back))
        return (None, None, None, *(None if grad is None else next(moved) for grad in grads))
