"""A worker process: take a task, join the process group, run it, forget everything."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Task:
    """One rank's part of a case.

    Attributes:
        function: path ``"package.module:name"``.
        arguments: keyword arguments of the function.
        rank, world_size: place in the process group.
        port: port of the store of all cases.
        prefix: prefix of this case's keys in the store.
    """

    function: str
    arguments: Mapping[str, Any]
    rank: int
    world_size: int
    port: int
    prefix: str


@dataclass(frozen=True)
class Answer:
    """A rank's result, or the traceback of its exception."""

    result: Any = None
    failure: str | None = None


def serve(pipe: Connection, log: str) -> None:
    """Run tasks until the other end closes; all output goes to the file ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on the terminal: the pool ends its workers
    share_device()
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        answer = _run(task)
        try:
            content = pickle.dumps(answer)
        except Exception:
            content = pickle.dumps(Answer(failure=f"the result cannot be sent:\n{traceback.format_exc()}"))
        pipe.send_bytes(content)


def share_device() -> None:
    """Put all gloo groups of this process on one device."""
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    # A group with its own device has a thread, which checks only every 10 ms whether to exit; one of
    # Megatron's cases has twenty groups.
    device = ProcessGroupGloo.create_device(interface="lo")

    class StandsForBoth(type(ProcessGroupGloo)):  # type: ignore[misc]
        def __instancecheck__(cls, thing: Any) -> bool:
            return type.__instancecheck__(ProcessGroupGloo, thing)

    class OnSharedDevice(ProcessGroupGloo, metaclass=StandsForBoth):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            # torch 2.14 passes more arguments, which these groups do not need.
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice


def _run(task: Task) -> Answer:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(task.rank), WORLD_SIZE=str(task.world_size), LOCAL_RANK=str(task.rank))
    try:
        store = dist.PrefixStore(task.prefix, dist.TCPStore("127.0.0.1", task.port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size)
        module, _, name = task.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        result = function(**task.arguments)
        # A finished rank must not tear down connections that others still use.
        dist.barrier()
        return Answer(result)
    except BaseException:
        return Answer(failure=traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        forget_everything()


def forget_everything() -> None:
    """Restore the process's global state from before a case."""
    import torch
    import torch.distributed as dist

    session = sys.modules.get("mindspeed_dsa.session")
    if session is not None:
        session.disable()
    _forget_megatron()
    if (tensors := sys.modules.get("torch.distributed.tensor")) is not None:
        # Results of operators on a mesh are cached by its ranks, with an earlier case's mesh. Importing
        # torch.distributed.tensor.debug, which can clear the cache, takes a second.
        found = tensors.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        getattr(found, "cache", found).cache_clear()  # wrapped in an object before 2.10
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", bool)()  # from 2.10 on
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)
    gc.collect()  # models hold reference cycles


# Megatron-core 0.12 sets these only on member ranks, and never resets them.
_RANKS_THAT_STAY = (
    "_PIPELINE_GLOBAL_RANKS",
    "_EMBEDDING_GLOBAL_RANKS",
    "_POSITION_EMBEDDING_GLOBAL_RANKS",
)


def _forget_megatron() -> None:
    """Reset everything that Megatron keeps in modules and classes, as far as it was imported."""
    parallel_state = _loaded("parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
        getattr(parallel_state, "_HYBRID_DP_CP_GROUPS", {}).clear()  # 0.13 and later
        for name in _RANKS_THAT_STAY:
            if hasattr(parallel_state, name):
                setattr(parallel_state, name, None)
    if (calculator := _loaded("num_microbatches_calculator")) is not None:
        calculator.destroy_num_microbatches_calculator()
    if (generators := _loaded("tensor_parallel.random")) is not None:
        generators._CUDA_RNG_STATE_TRACKER = None
        generators._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    if (moe := _loaded("transformer.moe.moe_utils")) is not None:
        getattr(moe, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}).clear()
        moe.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if (replay := _loaded("transformer.moe.router_replay")) is not None:
        replay.RouterReplay.clear_global_router_replay_instances()
    if (mtp := _loaded("transformer.multi_token_prediction")) is not None:
        import torch

        mtp.MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
        mtp.MTPLossLoggingHelper.tracker = {}
    if (dsa := _loaded("transformer.experimental_attention_variant.dsa")) is not None:
        dsa.DSAIndexerLossLoggingHelper.tracker = {}
        dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    if (whole := _loaded("full_cuda_graph")) is not None:
        for name, value in (("curr_iteration", 0), ("cuda_graph", None), ("result", None)):
            kept = getattr(whole.FullCudaGraphWrapper, name)
            kept.update(dict.fromkeys(kept, value))
    if (parts := _loaded("transformer.cuda_graphs")) is not None:
        parts._CudagraphGlobalRecord.cudagraph_created = False
        parts._CudagraphGlobalRecord.cudagraph_record = []
    if (ours := sys.modules.get("mindspeed_dsa.features.dsa.indexer_loss")) is not None:
        ours.indexer_loss.cache_clear()
    if (ddp := _loaded("distributed.distributed_data_parallel")) is not None:
        for thing in gc.get_referrers(ddp.DistributedDataParallel):
            if type(thing) is ddp.DistributedDataParallel:
                # A token dispatcher keeps a tensor of its last microbatch, whose graph ends in DDP's hooks,
                # which hold the model. The collector cannot see through autograd's nodes, so the model would
                # stay forever.
                thing.__dict__.clear()


def _loaded(name: str) -> Any:
    return sys.modules.get(f"megatron.core.{name}")
