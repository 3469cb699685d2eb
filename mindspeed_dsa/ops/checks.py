"""Argument checks: shapes and dtypes always, the contents of tensors on request.

Reading a tensor costs a pass over it and, on an accelerator, a synchronization with the device. Content
checks therefore run only after :func:`set_debug_checks`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_dsa.ops.precision import wide

_enabled = False


def set_debug_checks(enabled: bool) -> bool:
    """Switch the checks of tensor contents on or off, and return the previous state."""
    global _enabled
    before, _enabled = _enabled, enabled
    return before


def enabled() -> bool:
    """Return whether the checks of tensor contents are on."""
    return _enabled


def require(condition: bool, operator: str, problem: str | Callable[[], str]) -> None:
    """Raise ``ValueError`` naming the operator unless ``condition`` holds.

    ``problem`` may be a function that builds the message. Operators that are about as fast as formatting the
    message pass one, so that it is only formatted on failure.
    """
    if not condition:
        raise ValueError(f"{operator}: {problem if isinstance(problem, str) else problem()}")


def check_shape(
    operator: str, name: str, tensor: Tensor, expected: tuple[int | None, ...], letters: str
) -> None:
    """Raise unless ``tensor`` has the expected sizes; None in ``expected`` accepts any size."""
    fits = tensor.dim() == len(expected) and all(
        want is None or want == have for want, have in zip(expected, tensor.shape, strict=True)
    )
    require(fits, operator, f"{name} must be {letters}, got {list(tensor.shape)}")


def check_heads(operator: str, name: str, tensor: Tensor) -> None:
    """Raise if ``heads`` or ``dim`` of a ``[batch, query_length, heads, dim]`` tensor is 0."""
    require(
        tensor.shape[2] >= 1 and tensor.shape[3] >= 1,
        operator,
        f"{name} must have at least one head, each of at least one dimension, got {list(tensor.shape)}",
    )


def check_float(operator: str, **tensors: Tensor) -> None:
    """Raise unless all tensors have the same floating dtype and the same device."""
    first_name, first = next(iter(tensors.items()))
    require(first.is_floating_point(), operator, f"{first_name} must be floating point, got {first.dtype}")
    for name, tensor in tensors.items():
        require(
            tensor.dtype == first.dtype and tensor.device == first.device,
            operator,
            f"{name} ({tensor.dtype} on {tensor.device}) must have the dtype and device of "
            f"{first_name} ({first.dtype} on {first.device}); convert one of them",
        )


def checked_sink(operator: str, sink: Tensor | None, query: Tensor) -> Tensor | None:
    """Raise unless a sink is ``[heads]`` on the query's device, and return it in the dtype of the scores."""
    if sink is None:
        return None
    heads = query.shape[2]
    check_shape(operator, "sink", sink, (heads,), f"[{heads}], one logit per head")
    require(
        sink.is_floating_point() and sink.device == query.device,
        operator,
        f"sink must be floating point on {query.device}, got {sink.dtype} on {sink.device}",
    )
    return sink.to(wide(query.dtype))


def check_weights(operator: str, name: str, weights: Tensor, query: Tensor) -> None:
    """Raise unless the indexer's weights are floating point and on the query's device.

    The dtypes may differ: DeepSeek keeps the weights' projection in fp32 while queries are bf16.
    """
    require(
        weights.is_floating_point() and weights.device == query.device,
        operator,
        f"{name} must be floating point on {query.device}, got {weights.dtype} on {weights.device}",
    )


def names_key(topk_indices: Tensor, key_length: int) -> Tensor:
    """Return a bool mask shaped like ``topk_indices``: True where the entry is in ``[0, key_length)``.

    All backends use this rule. -1 means "no key". Any other entry outside the range is treated like -1, and
    never used as an address.
    """
    return (topk_indices >= 0) & (topk_indices < key_length)


def check_topk_indices(operator: str, topk_indices: Tensor, query: Tensor, key_length: int) -> None:
    """Check an index tensor: always its shape, dtype and device, in debug mode its contents too.

    Args:
        operator: operator's name in the error.
        topk_indices: ``[batch, query_length, topk]`` int32 or int64, with ``topk`` at least 1 unless there
            are no queries or no keys.
        query: ``[batch, query_length, ...]``, the queries that selected the keys.
        key_length: number of keys that the entries index.

    Raises:
        ValueError: the shape, dtype, device or contents do not fit.
    """
    rows = tuple(query.shape[:2])
    check_shape(operator, "topk_indices", topk_indices, (*rows, None), f"[{rows[0]}, {rows[1]}, topk]")
    require(
        topk_indices.dtype in (torch.int32, torch.int64) and topk_indices.device == query.device,
        operator,
        f"topk_indices must be int32 or int64 on {query.device}, got {topk_indices.dtype} on "
        f"{topk_indices.device}",
    )
    require(
        topk_indices.shape[2] >= 1 or rows[0] * rows[1] * key_length == 0,
        operator,
        "topk_indices must have at least one entry per row; -1 stands for no key",
    )
    check_indices(operator, topk_indices, key_length)


def check_indices(operator: str, topk_indices: Tensor, key_length: int) -> None:
    """Check the contents of an index tensor; does nothing unless debug checks are on.

    Args:
        operator: operator's name in the error.
        topk_indices: ``[..., topk]`` int32; valid entries first, -1 at the tail.
        key_length: number of keys that the entries index.

    Raises:
        ValueError: an entry is out of range, occurs twice in its row, or follows a -1.
    """
    if not _enabled or topk_indices.numel() == 0:
        return
    lowest, highest = torch.aminmax(topk_indices)
    require(
        int(lowest) >= -1 and int(highest) < key_length,
        operator,
        f"topk_indices must lie in [-1, {key_length}), got values from {int(lowest)} to {int(highest)}",
    )
    valid = topk_indices >= 0  # [..., topk]
    holes = (valid[..., 1:] & ~valid[..., :-1]).any(-1)  # [...]: a valid entry follows an invalid one
    if holes.any():
        raise ValueError(
            f"{operator}: a valid entry follows -1 in {int(holes.sum())} rows of topk_indices, first row "
            f"{_first(holes)}; move the -1 entries to the tail"
        )
    # After sorting, equal neighbours are duplicates; -1 may repeat.
    ordered = topk_indices.sort(-1).values  # [..., topk]
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)  # [...]
    if twice.any():
        raise ValueError(
            f"{operator}: an index occurs twice in {int(twice.sum())} rows of topk_indices, first row "
            f"{_first(twice)}; a key that is listed twice would be counted twice"
        )


def check_finite(operator: str, **tensors: Tensor) -> None:
    """Check that the indexer's operands are finite; does nothing unless debug checks are on.

    Without this check NaN may go unnoticed: a key with a NaN score is not selected by queries that see enough
    other keys, so the results have no NaN.

    Args:
        operator: operator's name in the error.
        tensors: tensors of shape ``[..., n]``, by name.

    Raises:
        ValueError: an entry is NaN or infinite.
    """
    for name, tensor in tensors.items() if _enabled else ():
        wrong = ~tensor.isfinite().all(-1)
        if wrong.any():
            raise ValueError(
                f"{operator}: {name} is not finite at {int(wrong.sum())} of {wrong.numel()} places, first "
                f"{_first(wrong)}; look for the first layer whose output is not"
            )


def _first(rows: Tensor) -> list[int]:
    return rows.nonzero()[0].tolist()
