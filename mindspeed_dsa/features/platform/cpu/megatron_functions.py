"""Replacements of Megatron's own functions on the CPU platform."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_Function = Callable[..., Any]


def set_device_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    """Set the CPU generator's state; replaces ``_set_cuda_rng_state``.

    Args:
        new_state: uint8 tensor as from ``torch.get_rng_state``.
        device: ignored, because there is only one device.
        graph_safe: must be false, because CUDA graphs are not supported.

    Raises:
        ValueError: a CUDA-graph-safe state was requested.
    """
    if graph_safe:
        raise ValueError("the CPU platform does not support CUDA graphs; omit --cuda-graph-impl")
    torch.set_rng_state(new_state)


class _HostStateFilter(logging.Filter):
    """Log filter that drops the RNG tracker's warning that the CPU random state has changed."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.msg


_FILTER = _HostStateFilter()


def fork_without_warning(original: _Function) -> _Function:
    """Decorate ``CudaRNGStatesTracker.fork`` to suppress its warning."""
    # The tracker warns if the CPU generator changes inside a fork. Here the CPU generator is the forked one,
    # and the tracker restores it.
    logger = logging.getLogger(original.__module__)

    @contextlib.contextmanager
    def fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(logger.removeFilter, _FILTER)
            stack.enter_context(original(self, *args, **kwargs))
            # Callbacks run in reverse order: the filter is active when the fork exits and would warn.
            stack.callback(logger.addFilter, _FILTER)
            yield

    return fork


def allow_no_cuda(original: _Function) -> _Function:
    """Decorate ``initialize_megatron`` to set ``allow_no_cuda``."""

    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    return initialize_megatron


def convert_split_sizes(original: _Function) -> _Function:
    """Decorate ``maybe_move_tensor_to_cpu`` to convert CPU tensors to numpy too."""
    # The original returns a CPU tensor unchanged, even with `as_numpy`. The token dispatcher passes the
    # result to `all_to_all_single` as split sizes, which must be integers.

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
        moved = original(tensor, as_numpy, *args, **kwargs)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    return maybe_move_tensor_to_cpu


def gather_uneven(original: _Function) -> _Function:
    """Decorate ``_gather_along_first_dim`` to pad uneven parts, as gloo gathers only equal sizes."""

    def _gather_along_first_dim(
        input_: torch.Tensor, group: Any = None, output_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not _is_uneven(output_split_sizes, group):
            gathered: torch.Tensor = original(input_, group, output_split_sizes, *args, **kwargs)
            return gathered
        largest = max(output_split_sizes)
        padded = input_.new_zeros(largest, *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return _gather_along_first_dim


def reduce_scatter_uneven(original: _Function) -> _Function:
    """Decorate ``_reduce_scatter_along_first_dim`` to pad uneven parts, as gloo scatters only equal sizes."""

    def _reduce_scatter_along_first_dim(
        input_: torch.Tensor, group: Any = None, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not _is_uneven(input_split_sizes, group):
            scattered: torch.Tensor = original(input_, group, input_split_sizes, *args, **kwargs)
            return scattered
        largest = max(input_split_sizes)
        padded = input_.new_zeros(len(input_split_sizes), largest, *input_.shape[1:])
        for row, part in zip(padded, input_.split(input_split_sizes), strict=True):
            row[: len(part)] = part
        output = torch.empty_like(padded[0])
        dist.reduce_scatter_tensor(output, padded.flatten(0, 1), group=group)
        return output[: input_split_sizes[group.rank()]]

    return _reduce_scatter_along_first_dim


def _is_uneven(sizes: Any, group: Any) -> bool:
    if sizes is None or group is None or group.size() == 1:
        return False
    return bool(dist.get_backend(group) == "gloo")


def fork_for_each_save(original: _Function) -> _Function:
    """Decorate ``AsyncCallsQueue.__init__`` to ignore ``persistent`` and fork a writer for each save."""

    def __init__(self: Any, persistent: bool = False, **kwargs: Any) -> None:
        original(self, persistent=False, **kwargs)

    return __init__


def no_writer_to_start(*args: Any, **kwargs: Any) -> None:
    """Do nothing; replaces ``AsyncCallsQueue.warmup_persistent_caller``."""
