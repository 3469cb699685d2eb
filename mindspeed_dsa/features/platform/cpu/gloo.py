"""Process groups and pipeline messages over gloo.

Groups are destroyed together with Megatron's parallel state.

Without this module, interleaved pipelines over gloo would compute wrong gradients. Megatron's overlapped
schedule starts a send, and before the next microbatch sets the sent tensor's ``.data`` to a one-element
tensor (``deallocate_output_tensor``). It waits for the send only later. On NCCL this is sound: the send is
enqueued on a stream, and the caching allocator reuses the memory only for later work on that stream. A gloo
send reads the memory when the receiver is ready, from a separate thread, at the address taken at its start.
Its work object holds the tensor, but ``.data`` replaces the tensor's storage, so the memory is freed under a
pending send. The receiver then gets arbitrary data, which shows as wrong gradients, NaN, or
``writev: Bad address`` if the pages are unmapped.

Gloo also lacks two other properties of NCCL:

* NCCL pairs the sends and receives of two ranks by the order in which they were started. Megatron lists a
  batch as (previous, next) on both sides. With two pipeline ranks, previous and next are the same rank, so
  one rank would receive an activation where it expects a gradient. Gloo has tags, which distinguish the two.
* An NCCL work object may be dropped. Dropping an incomplete gloo send cancels it: the message is lost and the
  receiver hangs. The schedule drops the handle of its last forward send. This matters in evaluation, where no
  returning gradient shows that the message has arrived.

In this module, a send therefore uses an alias tensor that keeps the storage alive. Its handle is kept until
the send is complete, each direction has its own tag, and the schedule returns only after its sends are
complete. The shapes that ``variable_seq_lengths`` exchanges first are not tagged. With two pipeline ranks and
several model chunks they need the overlapped schedule, which Megatron-LM requires anyway.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, barrier, destroy_process_group

from mindspeed_dsa.feature import Context, Megatron

_Function = Callable[..., Any]

# -- groups --------------------------------------------------------------------------------------

_remembered: defaultdict[Megatron, WeakSet[ProcessGroup]] = defaultdict(WeakSet)
"""Dict from a Megatron package that keeps no list of its groups to this rank's groups. It outlives a session,
because enabling another feature starts a new one."""


def remember_group(original: _Function, context: Context[None]) -> _Function:
    """Decorate ``create_group`` to record created groups, in Megatron releases that keep no list of them."""
    # Not all groups can be found in Megatron's module: if a rank belongs to two groups of one kind, some
    # variables hold the last one only.

    def create_group(*args: Any, **kwargs: Any) -> Any:
        group = original(*args, **kwargs)
        if isinstance(group, ProcessGroup):  # a rank outside the group gets a placeholder
            _remembered[context.megatron].add(group)
        return group

    return create_group


def set_up_together(original: _Function) -> _Function:
    """Decorate ``initialize_model_parallel`` to return only after every rank has created all its groups."""
    # Creating a gloo group waits for the rank's own connections only. A rank that finishes early and destroys
    # the group would disconnect ranks that are still connecting. The barrier is here, which all ranks reach.
    # A failed rank may reach the destruction alone.

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        barrier()
        return result

    return initialize_model_parallel


def destroy_groups(original: _Function, context: Context[None]) -> _Function:
    """Decorate ``destroy_model_parallel`` to destroy the groups created by Megatron's ``create_group``."""
    # The module's variables may also hold the world group or a group of the caller. Like Megatron's
    # destruction of its explicit gloo groups, this does not wait for other ranks.

    def destroy_model_parallel() -> None:
        remembered = _remembered.pop(context.megatron, ())
        state = vars(context.megatron("core.parallel_state"))
        listed = state.get("_global_process_group_list") or ()
        groups = {group for group in (*remembered, *listed) if isinstance(group, ProcessGroup)}
        original()
        context.state(Sends).clear()  # sends of a failed step, which are never received
        for group in groups:
            # Some groups were destroyed before: by the caller, by Megatron just now, or with the world.
            with contextlib.suppress(ValueError):
                destroy_process_group(group)
        _forget(state, groups)

    return destroy_model_parallel


def _forget(variables: dict[str, Any], groups: set[ProcessGroup]) -> None:
    """Remove references to groups from a module's variables, lists and dicts."""
    # A reference would keep the group's threads alive.
    for name, value in variables.items():
        if isinstance(value, ProcessGroup) and value in groups:
            variables[name] = None
        elif isinstance(value, list):
            value[:] = [item for item in value if not (isinstance(item, ProcessGroup) and item in groups)]
        elif isinstance(value, dict):
            gone = [key for key, item in value.items() if isinstance(item, ProcessGroup) and item in groups]
            for key in gone:
                del value[key]


# -- pipeline messages ---------------------------------------------------------------------------

_FORWARD_TAG = 1  # activations, to the next rank
_BACKWARD_TAG = 2  # gradients, to the previous rank


class Sends(list[tuple[Any, torch.Tensor]]):
    """List of pipeline sends that may be incomplete, as ``(work, alias of the sent tensor)``."""

    def __init__(self, context: Context[None]) -> None:
        super().__init__()


def exchange_overlapped(original: _Function, context: Context[None]) -> _Function:
    """Decorate ``_p2p_ops``, which returns a dict of handles, to exchange safely over gloo."""

    def _p2p_ops(*, group: Any, **kwargs: Any) -> Any:
        if _over_gloo(group):
            return _exchange(context.state(Sends), group=group, **kwargs)
        return original(group=group, **kwargs)

    return _p2p_ops


def exchange_batched(original: _Function, context: Context[None]) -> _Function:
    """Decorate ``_batched_p2p_ops``, which returns a list of handles, to exchange safely over gloo."""

    def _batched_p2p_ops(*, group: Any, **kwargs: Any) -> Any:
        if _over_gloo(group):
            return list(_exchange(context.state(Sends), group=group, **kwargs).values())
        return original(group=group, **kwargs)

    return _batched_p2p_ops


def complete_sends(original: _Function, context: Context[None]) -> _Function:
    """Decorate the interleaved schedule to wait for sends whose handles it has dropped."""
    # By then this rank has started all transfers of the step, so no other rank can be waiting for it, and the
    # waits complete.

    def forward_backward_pipelining_with_interleaving(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        pending = context.state(Sends)
        for work, _ in pending:
            if not work.is_completed():  # a second wait on a gloo send never returns
                work.wait()
        pending.clear()
        return result

    return forward_backward_pipelining_with_interleaving


def _over_gloo(group: Any) -> bool:
    return bool(dist.get_backend(group) == "gloo")


def _exchange(
    pending: Sends,
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
    group: Any,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, Any]:
    """Start up to four sends and receives with the neighboring pipeline stages.

    Args:
        pending: sends that may be incomplete; the sends started here are appended.
        tensor_send_prev: gradient for the previous rank.
        tensor_recv_prev: buffer for the previous rank's activation.
        tensor_send_next: activation for the next rank.
        tensor_recv_next: buffer for the next rank's gradient.
        group: gloo process group.
        prev_pipeline_rank: global rank of the previous stage.
        next_pipeline_rank: global rank of the next stage.

    Returns:
        Dict of handles with keys ``send_prev``, ``recv_prev``, ``send_next``, ``recv_next``.
    """
    pending[:] = [(work, sent) for work, sent in pending if not work.is_completed()]
    handles: dict[str, Any] = {}
    if tensor_recv_prev is not None:
        handles["recv_prev"] = dist.irecv(tensor_recv_prev, prev_pipeline_rank, group, _FORWARD_TAG)
    if tensor_recv_next is not None:
        handles["recv_next"] = dist.irecv(tensor_recv_next, next_pipeline_rank, group, _BACKWARD_TAG)
    if tensor_send_next is not None:
        handles["send_next"] = _send(tensor_send_next, next_pipeline_rank, group, _FORWARD_TAG, pending)
    if tensor_send_prev is not None:
        handles["send_prev"] = _send(tensor_send_prev, prev_pipeline_rank, group, _BACKWARD_TAG, pending)
    return handles


def _send(tensor: torch.Tensor, rank: int, group: Any, tag: int, pending: Sends) -> Any:
    alias = tensor.detach()  # survives `tensor.data = ...`
    work = dist.isend(alias, rank, group, tag)
    pending.append((work, alias))
    return work
