"""Process groups over gloo: made without NCCL's options, destroyed with Megatron's parallel state."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch.distributed import ProcessGroup, barrier, destroy_process_group

from mindspeed_dsa.feature import Context, Megatron

_Function = Callable[..., Any]

_remembered: defaultdict[Megatron, WeakSet[ProcessGroup]] = defaultdict(WeakSet)
"""Groups of this rank, by the Megatron that created them and keeps no list of them. They outlive a
session: enabling another feature starts a new one."""


def remember_group(original: _Function, context: Context[None]) -> _Function:
    """Decorate ``create_group`` of a Megatron that keeps no list of its groups.

    Not all of them can be found in its module: where a rank belongs to two groups of one kind, some
    variables hold the last one only.
    """

    def create_group(*args: Any, **kwargs: Any) -> Any:
        group = original(*args, **kwargs)
        if isinstance(group, ProcessGroup):  # a rank outside the group gets a placeholder
            _remembered[context.megatron].add(group)
        return group

    return create_group


def no_nccl_options(pg_name: str, nccl_comm_cfgs: Any) -> None:
    """Replaces ``get_nccl_options``: groups are gloo's, whatever is asked of NCCL.

    Megatron asks for a stream of high priority with ``--use-torch-fsdp2``, ``--high-priority-stream-groups``
    and ``--nccl-communicator-config-path``.
    """


def set_up_together(original: _Function) -> _Function:
    """Decorate ``initialize_model_parallel``: return only when every rank has all its groups.

    Creating a gloo group waits only for the rank's own connections. A rank that finishes early and destroys
    the group would disconnect ranks that are still connecting to it. The barrier is here, which all ranks
    reach, and not in the destruction, which a failed rank reaches alone.
    """

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        barrier()
        return result

    return initialize_model_parallel


def destroy_groups(original: _Function, context: Context[None]) -> _Function:
    """Decorate ``destroy_model_parallel``.

    Only groups created by Megatron's ``create_group`` are destroyed; the module's variables may also hold the
    world group or one of the caller's. Like Megatron's own destruction of its explicit gloo groups, this
    waits for no other rank.
    """

    def destroy_model_parallel() -> None:
        remembered = _remembered.pop(context.megatron, ())
        state = vars(context.megatron("core.parallel_state"))
        listed = state.get("_global_process_group_list") or ()
        groups = {group for group in (*remembered, *listed) if isinstance(group, ProcessGroup)}
        original()
        for group in groups:
            # Others were destroyed before: by the caller, by Megatron just now, or with the world.
            with contextlib.suppress(ValueError):
                destroy_process_group(group)
        _forget(state, groups)

    return destroy_model_parallel


def _forget(variables: dict[str, Any], groups: set[ProcessGroup]) -> None:
    """Remove groups from variables, lists and dictionaries of a module: a reference keeps threads alive."""
    for name, value in variables.items():
        if isinstance(value, ProcessGroup) and value in groups:
            variables[name] = None
        elif isinstance(value, list):
            value[:] = [item for item in value if not (isinstance(item, ProcessGroup) and item in groups)]
        elif isinstance(value, dict):
            gone = [key for key, item in value.items() if isinstance(item, ProcessGroup) and item in groups]
            for key in gone:
                del value[key]
