"""Worker functions: Megatron's process groups, created and destroyed repeatedly."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import mindspeed_dsa
from tests.support import contexts

_LAYOUTS: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},  # the second rank is in no position embedding group
]
if find_spec("einops"):  # Megatron needs einops for hierarchical groups
    _LAYOUTS += [
        {"context_parallel_size": 2, "hierarchical_context_parallel_sizes": [1, 2]},
        {"num_distributed_optimizer_instances": 2},
    ]


def rounds(enabled: bool, count: int) -> list[tuple[int, int]]:
    """Return the numbers of threads and process groups after each of ``count`` rounds."""
    from megatron.core import parallel_state

    counts = []
    with mindspeed_dsa.enabled(mindspeed_platform="cpu") if enabled else contextlib.nullcontext():
        for number in range(count):
            parallel_state.initialize_model_parallel(**_LAYOUTS[number % len(_LAYOUTS)])
            dist.all_reduce(torch.ones(1000), group=parallel_state.get_tensor_and_data_parallel_group())
            parallel_state.destroy_model_parallel()
            counts.append(_left())
    return counts


def with_a_stream_of_high_priority() -> tuple[str, float]:
    """Return the backend of a group for which Megatron requests a high-priority stream, and a sum over it."""
    from megatron.core import parallel_state

    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        parallel_state.initialize_model_parallel(high_priority_stream_groups=["dp_cp"])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        backend = dist.get_backend(group)
        parallel_state.destroy_model_parallel()
        return backend, ones.item()


def without_a_list() -> list[tuple[int, int]]:
    """Run rounds in a Megatron without a list of its groups, with two unreferenced groups; on two ranks."""
    from megatron.core import parallel_state

    from mindspeed_dsa.features.platform.cpu.gloo import remember_group

    # Groups are remembered by the patched function, because Megatron has no list here.
    remembering = remember_group(parallel_state.create_group, contexts.context("cpu-platform"))
    counts = []
    with (
        mindspeed_dsa.enabled(mindspeed_platform="cpu"),
        mock.patch.object(parallel_state, "create_group", remembering),
    ):
        for _ in range(3):
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
            for _ in range(2):
                parallel_state.create_group([0])  # rank 1 gets a placeholder
            # As in releases that have no such list.
            parallel_state._global_process_group_list = None
            parallel_state.destroy_model_parallel()
            counts.append(_left())
    return counts


def of_two_megatrons() -> tuple[float, list[bool]]:
    """Return a sum over the second Megatron's group after the first one's are destroyed, and the remaining
    groups.
    """
    from mindspeed_dsa.features.platform.cpu.gloo import destroy_groups, remember_group

    first, second = (contexts.context("cpu-platform", root=root) for root in ("megatron", "corp_megatron"))
    # One world, two Megatron packages.
    groups = [remember_group(dist.new_group, context)([0, 1]) for context in (first, second)]
    destroy_groups(lambda: None, first)()
    number = torch.ones(())
    dist.all_reduce(number, group=groups[1])
    left = [group in distributed_c10d._world.pg_map for group in groups]
    dist.destroy_process_group(groups[1])
    return number.item(), left


def set_up_at_different_times() -> tuple[float, float]:
    """Return when this rank had made all its groups, the second rank being slow, and when it returned."""
    from megatron.core import parallel_state

    made = []

    # The last function that Megatron calls before it returns.
    def last_step() -> None:
        time.sleep(dist.get_rank())
        made.append(time.monotonic())

    with (
        mindspeed_dsa.enabled(mindspeed_platform="cpu"),
        mock.patch.object(parallel_state, "_set_global_memory_buffer", last_step),
    ):
        parallel_state.initialize_model_parallel()
        return made[0], time.monotonic()


def nested() -> list[Any]:
    """Destroy groups in lists and dicts, as hierarchical and hybrid context parallelism keep them; on two
    ranks.
    """
    counts = []
    for _ in range(2):
        with _set_up() as state:
            pair, alone = state.create_group([0, 1]), state.create_group([dist.get_rank()])
            state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = [alone, pair]
            state._HYBRID_DP_CP_GROUPS = {2: pair}
            # Local variables would keep the groups alive.
            del pair, alone
            state.destroy_model_parallel()
        counts.append((*_left(), state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS, state._HYBRID_DP_CP_GROUPS))
    return counts


def what_is_not_megatrons() -> list[Any]:
    """Return sums over the caller's groups after a destruction; Megatron's variables hold two of them."""
    with _set_up() as state:
        callers, lent = dist.new_group([0, 1]), dist.new_group([0, 1])
        state._POSITION_EMBEDDING_GROUP = lent
        state._HYBRID_DP_CP_GROUPS = {2: dist.group.WORLD, 4: lent}
        state.destroy_model_parallel()
        sums = []
        for group in (callers, lent, dist.group.WORLD):
            number = torch.tensor(dist.get_rank() + 1.0)
            dist.all_reduce(number, group=group)
            sums.append(number.item())
        return [*sums, {2: dist.group.WORLD, 4: lent} == state._HYBRID_DP_CP_GROUPS]


def destroyed_before(stores: list[str]) -> list[tuple[int, int, list[str]]]:
    """Destroy groups after the caller has destroyed a group, or the world if ``stores`` for new ones are
    given.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    counts = []
    for number in range(2):
        with _set_up() as state:
            if stores:
                dist.barrier()
                dist.destroy_process_group()
            else:
                dist.destroy_process_group(state.get_tensor_model_parallel_group())
            for _ in range(2):
                state.destroy_model_parallel()
            held = [name for name, value in vars(state).items() if isinstance(value, dist.ProcessGroup)]
            counts.append((*_left(), held))
        if stores:
            store = dist.FileStore(stores[number], size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return counts


@contextlib.contextmanager
def _set_up() -> Iterator[Any]:
    from megatron.core import parallel_state

    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        yield parallel_state


def _left() -> tuple[int, int]:
    """Return this process's number of threads, three per gloo group, and of process groups in torch."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(distributed_c10d._world.pg_map)
