"""Counts on a rank: bytes of storages, of activations while a step runs, and of collectives."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._C._distributed_c10d import ProcessGroup  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor

from benchmarks.memory.measure import live_bytes, profiled_levels, storage_bytes
from mindspeed_dsa.parallel import buffer_pool

GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "TP",
    "PIPELINE_MODEL_PARALLEL_GROUP": "PP",
    "CONTEXT_PARALLEL_GROUP": "CP",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "CP",
    "DATA_PARALLEL_GROUP": "DP",
    "DATA_PARALLEL_GROUP_WITH_CP": "DP",
    "EXPERT_MODEL_PARALLEL_GROUP": "EP",
    "EXPERT_TENSOR_PARALLEL_GROUP": "ETP",
    "EXPERT_DATA_PARALLEL_GROUP": "EDP",
    "EMBEDDING_GROUP": "embedding",
}
"""Plan's name of a process group, by Megatron's description."""
FORWARD = "benchmarks.plan: forward"


def level() -> int:
    """Return bytes of live storages, earlier jobs' included, without buffers that wait for a transfer."""
    return live_bytes() - storage_bytes(buffer_pool.held())


def state(model: list[Any], optimizer: Any, before: int) -> dict[str, float]:
    """Return bytes of weights, gradients and optimizer between steps.

    Args:
        model: chunks under data parallelism.
        optimizer: optimizer of all chunks.
        before: :func:`level` before the model was built.
    """
    from megatron.core import parallel_state

    modules = [item for chunk in model for item in chunk.modules()]
    weights = sum(_own(item).nbytes for chunk in model for item in chunk.parameters())
    weights += sum(item.nbytes for module in modules for item in module._buffers.values() if item is not None)
    in_buffers = (getattr(item, "main_grad", None) for chunk in model for item in chunk.parameters())
    sums = [item for item in in_buffers if item is not None]
    gradients = storage_bytes([*sums, *_sharded_gradients(optimizer)])
    scratch = storage_bytes(parallel_state.get_global_memory_buffer().buffer.values())
    # All other bytes since before the model was built are the optimizer's.
    rest = level() - before - weights - gradients - scratch
    return {"weights": weights, "gradients": gradients, "optimizer": rest}


def _own(tensor: Any) -> torch.Tensor:
    """Return this rank's shard."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _sharded_gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in each.optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    yield _own(parameter.grad)


def activations(step: Callable[[], Any]) -> tuple[float, float]:
    """Return peak bytes at the ends of forwards, and at any time of a step, above the initial level."""
    levels, marks = profiled_levels(step, FORWARD)
    times = [time for time, _ in levels]
    held = [levels[bisect_right(times, mark) - 1][1] for mark in marks]
    return float(max(held)), float(max(level for _, level in levels))


def marked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward step so that its end is an event of the profiler."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        with record_function(FORWARD):
            pass
        return result

    return call


@contextlib.contextmanager
def collectives() -> Iterator[dict[str, float]]:
    """Yield bytes that this rank receives in the block by group; ``other`` for groups that no plan has."""
    counts: dict[str, float] = defaultdict(float)

    def counting(original: Callable[..., Any], size: Callable[..., float]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            # A group of one rank transfers nothing.
            if group.size() > 1:
                counts[GROUPS.get(group.group_desc, "other")] += size(group, *args)
            return original(group, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name, size in _SIZES.items():
            if hasattr(ProcessGroup, name):
                wrapped = counting(getattr(ProcessGroup, name), size)
                stack.enter_context(mock.patch.object(ProcessGroup, name, wrapped))
        yield counts


def _first(tensors: Any) -> torch.Tensor:
    """Return a tensor, or the first one of nested lists."""
    return _first(tensors[0]) if isinstance(tensors, (list, tuple)) else tensors


def _listed(tensors: Any) -> float:
    if isinstance(tensors, (list, tuple)):
        return sum(map(_listed, tensors))
    return float(tensors.nbytes)


def _without_own(group: Any, output: Any, given: Any, receive: Any = None, *unused: Any) -> float:
    output = _first(output)
    rows = receive[group.rank()] if isinstance(receive, (list, tuple)) and receive else None
    # A rank's own rows do not travel.
    own = output.nbytes / group.size() if rows is None else rows * output.nbytes / max(output.size(0), 1)
    return output.nbytes - own


def _share(group: Any) -> float:
    return (group.size() - 1) / group.size()


# An all-reduce of d ranks is a reduce-scatter and an all-gather: 2 (d - 1) / d of the bytes.
_SIZES: dict[str, Callable[..., float]] = {
    "allreduce": lambda group, tensors, *unused: 2 * _listed(tensors) * _share(group),
    "allgather": lambda group, outputs, *unused: _listed(outputs) * _share(group),
    "_allgather_base": lambda group, output, *unused: _listed(output) * _share(group),
    "all_gather_single": lambda group, output, *unused: _listed(output) * _share(group),
    "_reduce_scatter_base": lambda group, output, given, *unused: _listed(given) * _share(group),
    "reduce_scatter_single": lambda group, output, given, *unused: _listed(given) * _share(group),
    "reduce_scatter": lambda group, output, given, *unused: _listed(given) * _share(group),
    "allreduce_coalesced": lambda group, tensors, *unused: 2 * _listed(tensors) * _share(group),
    "allgather_into_tensor_coalesced": lambda group, outputs, *unused: _listed(outputs) * _share(group),
    "all_gather_single_coalesced": lambda group, outputs, *unused: _listed(outputs) * _share(group),
    "reduce_scatter_tensor_coalesced": lambda group, out, given, *unused: _listed(given) * _share(group),
    "reduce_scatter_single_coalesced": lambda group, out, given, *unused: _listed(given) * _share(group),
    "alltoall_base": _without_own,
    "all_to_all_single": _without_own,
    "alltoall": lambda group, outputs, *unused: _listed(outputs) * _share(group),
    "recv": lambda group, tensors, *unused: _listed(tensors),
    "recv_anysource": lambda group, tensors, *unused: _listed(tensors),
}
