"""Declaration of the CPU platform: Megatron's ``torch.cuda`` calls are redirected to the host.

``torch.cuda.is_available()`` stays false, so that torch itself, torch.compile, DataLoader and checkpointing
behave as on any CPU build. Megatron accepts this because its own argument ``allow_no_cuda`` is set. Only
names used by Megatron-core or Megatron-LM's training loop are redirected.
"""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, on_platform
from mindspeed_dsa.features.platform.without_cuda import rows as without_cuda
from mindspeed_dsa.patches.spec import Kind, Patch
from mindspeed_dsa.settings import PLATFORM

_TORCH = "mindspeed_dsa.features.platform.cpu.torch_functions"
_GLOO = "mindspeed_dsa.features.platform.cpu.gloo"
_MEGATRON = "mindspeed_dsa.features.platform.cpu.megatron_functions"

_CUDA: tuple[tuple[str, Kind, str, str], ...] = (
    # target below torch.cuda, kind, implementation, why
    (":current_device", "replace", "current_device", "tensors created on the current device are CPU tensors"),
    (
        ":device_count",
        "replace",
        "device_count",
        "Megatron builds its groups and sets seeds only if a device exists",
    ),
    (
        ":is_available",
        "wrap",
        "available_as_before",
        "a torch that is built for GPUs may answer by the number of devices, which is ours from now on",
    ),
    (":set_device", "replace", "set_device", "the host is the only device"),
    (":synchronize", "replace", "synchronize", "host work is complete when a call returns"),
    (":get_device_capability", "replace", "get_device_capability", "a host has no CUDA architecture: (0, 0)"),
    (".memory:memory_allocated", "replace", "memory_current", "the resident set of the process"),
    (".memory:memory_reserved", "replace", "memory_current", "the resident set of the process"),
    (".memory:max_memory_allocated", "replace", "memory_peak", "the peak resident set of the process"),
    (".memory:max_memory_reserved", "replace", "memory_peak", "the peak resident set of the process"),
    (".memory:reset_peak_memory_stats", "replace", "reset_peak", "the peak of the resident set is reset"),
    (".memory:memory_stats", "replace", "memory_stats", "resident set under the allocator's keys"),
    (".memory:mem_get_info", "replace", "mem_get_info", "free and total memory are the host's"),
    (".streams:Stream", "value", "CpuStream", "streams are no-ops: the host has no queue"),
    (".streams:Event", "value", "CpuEvent", "events are no-ops and read the host clock"),
    (":stream", "replace", "stream", "a side stream does not change the order of work"),
    (":set_stream", "replace", "set_stream", "the stream is recorded for current_stream"),
    (":current_stream", "replace", "current_stream", "the current stream is the one set last"),
    (":default_stream", "replace", "default_stream", "there is one default stream"),
    (".graphs:is_current_stream_capturing", "replace", "never_capturing", "the host has no CUDA graphs"),
    (".random:get_rng_state", "replace", "get_rng_state", "dropout draws from the CPU generator"),
    (".random:set_rng_state", "replace", "set_rng_state", "dropout draws from the CPU generator"),
    (".random:get_rng_state_all", "replace", "get_rng_state_all", "dropout draws from the CPU generator"),
    (".random:set_rng_state_all", "replace", "set_rng_state_all", "dropout draws from the CPU generator"),
    (".random:manual_seed", "replace", "manual_seed", "seeds go to the CPU generator"),
    (".random:manual_seed_all", "replace", "manual_seed", "seeds go to the CPU generator"),
    (".random:initial_seed", "replace", "initial_seed", "the seed is the CPU generator's"),
)
_TENSOR_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_FACTORIES = (
    *("tensor", "as_tensor", "scalar_tensor", "empty", "empty_strided", "zeros", "ones", "full"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like"),
)
_TENSOR_METHODS: tuple[tuple[str, Kind, str, str], ...] = (
    ("to", "wrap", "tensor_to_host", "a move to 'cuda' stays on the CPU"),
    ("cuda", "replace", "tensor_cuda", "CPU tensors are already on Megatron's device"),
    ("pin_memory", "replace", "tensor_pin_memory", "memory cannot be pinned: an ordinary copy"),
    ("record_stream", "replace", "tensor_record_stream", "no queue of the host outlives the tensor"),
)
_BACKENDS = ("init_process_group", "new_group")

_PATCHES = (
    *without_cuda.ROWS,
    # All rows for torch have `stale="report"`: torch keeps tables of its own functions (overrides, dynamo,
    # jit), which may still refer to the originals.
    *(
        Patch(f"torch.cuda{target}", kind, f"{_TORCH}:{impl}", why, stale="report")
        for target, kind, impl, why in _CUDA
    ),
    *(
        Patch(
            f"torch.cuda:{name}Tensor",
            "value",
            f"torch:{name}Tensor",
            "isinstance and constructors mean the CPU type",
            stale="report",
        )
        for name in _TENSOR_TYPES
    ),
    *(
        Patch(
            f"torch:{name}",
            "wrap",
            f"{_TORCH}:factory_on_host",
            "device='cuda' is the CPU; no pinned memory",
            stale="report",
        )
        for name in _FACTORIES
    ),
    *(
        Patch(f"torch:Tensor.{name}", kind, f"{_TORCH}:{impl}", why, stale="report")
        for name, kind, impl, why in _TENSOR_METHODS
    ),
    *(
        Patch(
            f"torch.distributed.distributed_c10d:{name}",
            "wrap",
            f"{_TORCH}:group_over_gloo",
            "gloo replaces NCCL",
            stale="report",
        )
        for name in _BACKENDS
    ),
    Patch(
        "torch.jit._builtins:_find_builtin",
        "wrap",
        f"{_TORCH}:find_redirected_builtin",
        "torch.jit.script still resolves the redirected factories to operators",
        required=False,
        stale="report",
    ),
    Patch(
        "torch._dynamo.trace_rules:load_object",
        "wrap",
        f"{_TORCH}:load_redirected_builtin",
        "torch.compile still resolves the operators behind the redirected factories",
        required=False,
        stale="report",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        "replace",
        f"{_MEGATRON}:set_device_rng_state",
        "the tracker's states are states of the CPU generator",
        params=("new_state",),
    ),
    Patch(
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        "wrap",
        f"{_MEGATRON}:fork_without_warning",
        "one generator serves host and device here, so its change inside a fork needs no warning",
        required=False,
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        "wrap",
        f"{_MEGATRON}:convert_split_sizes",
        "split sizes of the experts' all-to-all are on the CPU already, but must become numbers",
        params=("tensor", "as_numpy"),
        required=False,
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
        "wrap",
        f"{_MEGATRON}:gather_uneven",
        "gloo gathers only tensors of equal size, and tensor parallel experts get uneven numbers of tokens",
        params=("input_", "group", "output_split_sizes"),
        required=False,
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
        "wrap",
        f"{_MEGATRON}:reduce_scatter_uneven",
        "gloo scatters only tensors of equal size, and tensor parallel experts get uneven numbers of tokens",
        params=("input_", "group", "input_split_sizes"),
        required=False,
    ),
    Patch(
        "megatron.core.parallel_state:create_group",
        "wrap",
        f"{_GLOO}:remember_group",
        "releases before 0.15 keep no list of the groups that they create",
        versions="<0.15",
        required=False,
    ),
    Patch(
        "megatron.core.parallel_state:initialize_model_parallel",
        "wrap",
        f"{_GLOO}:set_up_together",
        "a rank that destroys a gloo group would cut off those that are still connecting",
        required=False,
    ),
    Patch(
        "megatron.core.parallel_state:destroy_model_parallel",
        "wrap",
        f"{_GLOO}:destroy_groups",
        "each gloo group has three threads, and Megatron drops most of its groups without destroying them",
        required=False,
    ),
    *(
        Patch(
            f"megatron.core.tensor_parallel.{module}:dist_reduce_scatter_func",
            "value",
            "mindspeed_dsa.parallel.collectives:reduce_scatter_tensor",
            "over gloo torch's reduce-scatter is an all-reduce, which moves twice the bytes",
            required=False,
        )
        for module in ("layers", "mappings")
    ),
    Patch(
        "megatron.training.initialize:initialize_megatron",
        "wrap",
        f"{_MEGATRON}:allow_no_cuda",
        "Megatron's own setting for running without CUDA",
        params=("allow_no_cuda",),
        required=False,
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue.__init__",
        "wrap",
        f"{_MEGATRON}:fork_for_each_save",
        "a persistent writer shares the host's tensors with training, which changes them meanwhile; one that "
        "is forked for each save has its own",
        params=("persistent",),
        required=False,
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue.warmup_persistent_caller",
        "replace",
        f"{_MEGATRON}:no_writer_to_start",
        "a writer is forked for each save, and none is started before",
        versions=">=0.17",
        required=False,
    ),
)

_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_TENSORS = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
_PARAMS = (*_TENSORS, "group", "prev_pipeline_rank", "next_pipeline_rank")

P2P_ORDERING = (
    Patch(
        f"{_P2P}:_p2p_ops",
        "wrap",
        f"{_GLOO}:exchange_overlapped",
        "overlapped sends keep their data and their handles until they are complete",
        params=_PARAMS,
    ),
    Patch(
        f"{_P2P}:_batched_p2p_ops",
        "wrap",
        f"{_GLOO}:exchange_batched",
        "activations and gradients between the same two ranks cannot be mixed up",
        params=_PARAMS,
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        "wrap",
        f"{_GLOO}:complete_sends",
        "a send whose handle the schedule dropped is completed before the schedule returns",
    ),
)
"""Pipelines over gloo: sends keep their data alive, and messages are tagged by direction."""

CPU = Feature(
    name="cpu-platform",
    summary="Redirects Megatron's torch.cuda calls to the host: it trains on a CPU with gloo.",
    flags=(PLATFORM,),
    patches=(*_PATCHES, *P2P_ORDERING),
    active=on_platform("cpu"),
    doc="cpu-platform",
    platform_support=True,
)
