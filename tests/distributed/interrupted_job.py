"""The main job, run after other jobs in the same process that failed in the middle of a step.

Between jobs this module acts as Megatron-LM's in-process restart: it destroys the process groups and makes
new ones. Everything else has to be cleaned up by the job and by the library.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import memory_events

FAILED_STEP = 2
"""Number of the step that fails: caches are filled by then, and several microbatches are in flight."""


class _Failure(Exception):
    """Failure of a rank."""


@dataclass(frozen=True)
class Job:
    """Results of a job on one rank.

    Attributes:
        steps: loss, indexer loss and gradient norm per step.
        tensors: digests of the parameters and of the optimizer state.
        events: counts of ``memory_events``.
        failed: ``"failed"`` or the error text of each earlier job.
    """

    steps: list[tuple[Any, ...]]
    tensors: dict[str, str]
    events: dict[str, int]
    failed: list[str]


def train(
    argv: Sequence[str],
    switches: Mapping[str, Any],
    earlier: Sequence[tuple[str, Sequence[str], Mapping[str, Any]]],
) -> Job:
    """Run jobs that fail, then the main job.

    Args:
        argv: command-line flags of the main job.
        switches: feature switches of the main job.
        earlier: jobs that fail first: the place (``"forward"`` or ``"backward"``), their flags and switches.
    """
    failed: list[str] = []
    for number, (place, flags, others) in enumerate(earlier):
        failed.append(_fail(place, flags, others))
        _join_again(f"after-{number}")
    return _run(argv, switches, failed)


def _fail(place: str, argv: Sequence[str], switches: Mapping[str, Any]) -> str:
    from dsa_job import training

    stepper_class = training.Stepper

    def failing(*parts: Any) -> Any:
        stepper = stepper_class(*parts)
        _let_fail(stepper, place)
        return stepper

    with mock.patch.object(training, "Stepper", failing):
        try:
            _run(argv, switches, [])
        except Exception as error:
            # Other ranks may be waiting for this one.
            _close_connections()
            return "failed" if isinstance(error, _Failure) else f"{type(error).__name__}: {error}"
    raise AssertionError("the job has not failed")


def _let_fail(stepper: Any, place: str) -> None:
    """Raise in the last attention layer, in the second microbatch of a step or in its only one."""
    modules = [
        module
        for chunk in stepper.model
        for name, module in chunk.named_modules()
        if name.endswith("self_attention.linear_proj")
    ]
    step, calls = [0], [0]
    train_step = stepper.train_step

    def counted(number: int, data: Any) -> Any:
        step[0], calls[0] = number, 0
        return train_step(number, data)

    def fail(*unused: Any) -> None:
        raise _Failure(place)

    def forward(module: Any, args: Any, outputs: tuple[Tensor, Any]) -> None:
        calls[0] += step[0] == FAILED_STEP
        if calls[0] == min(2, stepper.microbatches):
            if place == "forward":
                fail()
            # Runs in backward, when the output's gradient arrives.
            outputs[0].register_hook(fail)

    stepper.train_step = counted
    modules[-1].register_forward_hook(forward)


def _close_connections() -> None:
    """Shut down all connections but the store's, as the end of a process does, to wake waiting ranks."""
    # gloo's ``abort`` does not close its connections.
    store = dist.distributed_c10d._get_default_store()
    # Prefix stores wrap the store that has the port.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for name in os.listdir("/proc/self/fd"):
        if not Path("/proc/self/fd", name).is_socket():
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] != store.port:
                connection.shutdown(socket.SHUT_RDWR)


def _join_again(name: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    gc.collect()
    # A new prefix, because the store still has the old groups' keys.
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=ranks)


def _run(argv: Sequence[str], switches: Mapping[str, Any], failed: list[str]) -> Job:
    from dsa_job import training
    from dsa_job.app import told
    from dsa_job.arguments import parse_args
    from dsa_job.validation import World, check

    import mindspeed_dsa

    args = parse_args(["--no-use-fused-dsa", *argv])
    check(args, World.from_environment())
    mindspeed_dsa.enable(**{**told(args), **switches})
    mindspeed_dsa.validate(args)
    digests: dict[str, str] = {}
    with memory_events.counted() as events:
        records = training.train(args, on_end=lambda stepper: digests.update(_digests(stepper)))
    steps = [(each["lm_loss"], each["indexer_loss"], each["grad_norm"]) for each in records]
    return Job(steps, digests, dict(events), failed)


def _digests(stepper: Any) -> dict[str, str]:
    tensors: dict[str, Any] = {}
    for number, chunk in enumerate(stepper.model):
        tensors.update((f"{number}.{name}", each) for name, each in chunk.named_parameters())
    for number, each in enumerate(_optimizers(stepper.optimizer)):
        for index, state in enumerate(each.state.values()):
            tensors.update((f"optimizer {number}.{index}.{key}", value) for key, value in state.items())
    return {name: _digest(value) for name, value in tensors.items()}


def _optimizers(optimizer: Any) -> Iterator[Any]:
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each.optimizer is not None:
            yield each.optimizer


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    from mindspeed_dsa.parallel.local_shards import local_of

    tensor = local_of(value.detach()).contiguous()
    return hashlib.blake2b(tensor.view(-1).view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
