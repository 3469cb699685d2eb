"""Process groups: one process needs no launcher, several are launched by torchrun."""

from __future__ import annotations

import argparse
import contextlib
import datetime
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from dsa_job.errors import UsageError
from dsa_job.validation import World
from mindspeed_dsa import platforms
from mindspeed_dsa.runs.files import RunError

Number = TypeVar("Number", int, float)
Result = TypeVar("Result")


def initialize(args: argparse.Namespace, world: World) -> bool:
    """Join the default process group unless it exists; return whether it was created here."""
    if dist.is_initialized():
        return False
    backend = args.distributed_backend or platforms.current().backend
    timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    if backend != "gloo":
        torch.cuda.set_device(world.local_rank)
    # A single process uses its own store without a port: any number of jobs can run side by side.
    store = dist.HashStore() if world.size == 1 else None
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return True


def device() -> torch.device:
    """Return the device of this process's tensors."""
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)


@contextlib.contextmanager
def model_parallel(args: argparse.Namespace) -> Iterator[None]:
    """Create Megatron's groups and random number generators for one job."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        # Megatron's own modules get their groups from the library.
        hierarchical_context_parallel_sizes=(
            None if args.transformer_impl == "local" else args.hierarchical_context_parallel_sizes
        ),
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, int(args.distributed_timeout_minutes)),
    )
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(seed(args))
        yield
    finally:
        parallel_state.destroy_model_parallel()


def seed(args: argparse.Namespace) -> int:
    """Return the seed of this pipeline rank; Megatron adds the tensor parallel rank where needed."""
    return int(args.seed) + 100 * parallel_state.get_pipeline_model_parallel_rank()


def from_rank_0(make: Callable[[], Result]) -> Result:
    """Call ``make`` on rank 0; return its result, or raise its UsageError or RunError, on every rank."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = make()
        except (UsageError, RunError) as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]  # type: ignore[no-any-return]


def max_over_ranks(value: Number) -> Number:
    """Return the largest value of all ranks; floats in float32, integers in int64."""
    tensor = torch.tensor(value, device=device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return type(value)(tensor.item())


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank."""
    return bool(max_over_ranks(int(flag)))
