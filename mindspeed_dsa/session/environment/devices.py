"""Checks of what devices, their allocators and Megatron read from the environment."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from mindspeed_dsa.environment import EnvironmentCheck, Finding, Surroundings
from mindspeed_dsa.megatron.configuration import argument

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_BLACKWELL = 10
_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
_ALGORITHMS_LATER = ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")
_WORKSPACES = (":4096:8", ":16:8")
"""Values that Megatron-LM takes beside --deterministic-mode: up to 0.18, and each of a list from 0.19 on."""


def _before(release: str | None, other: str) -> bool:
    """Return whether a release is older than another one; an unknown one is not."""
    try:
        return release is not None and Version(release) < Version(other)
    except InvalidVersion:  # a fork's own
        return False


def _sharded(about: Surroundings) -> str:
    """Return the flag of an FSDP that is on, for which Megatron-LM refuses one queue."""
    for name in ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"):
        if argument(about.args, name):
            return f"--{name.replace('_', '-')}"
    return ""


def find_connections(about: Surroundings) -> Iterator[Finding]:
    """Yield a number of the GPU's queues that Megatron refuses, or with which it hides less."""
    value = about.variable(CONNECTIONS)
    tp, cp = about.size("tensor_model_parallel_size"), about.size("context_parallel_size")
    if fsdp := _sharded(about):
        # Beside pipelines and experts the feature keeps the flag from Megatron's look at arguments.
        alone = about.size("pipeline_model_parallel_size") == about.size("expert_model_parallel_size") == 1
        seen = about.checked_by_megatron and (alone or fsdp != "--use-torch-fsdp2")
        if value == "1" and (seen or about.platform == "cuda"):
            yield Finding(
                "error" if seen else "warning",
                f"{CONNECTIONS}=1",
                f"with one queue the gathers of {fsdp} wait behind the layers that should hide them"
                + (", and Megatron-LM refuses it" if seen else ""),
                f"unset {CONNECTIONS}",
            )
        return
    if max(tp, cp) == 1:
        if value == "1" and about.argument("overlap_moe_expert_parallel_comm") and _is_older(about):
            yield Finding(
                "warning",
                f"{CONNECTIONS}=1",
                "before Blackwell, --overlap-moe-expert-parallel-comm needs more queues for two streams",
                f"export {CONNECTIONS}=32",
            )
        return
    if value == "1":
        return
    who, flag = f"{CONNECTIONS} {value or 'not set'}", f"tensor parallel size {tp}"
    flag = flag if tp > 1 else f"context parallel size {cp}"
    checked = about.checked_by_megatron and not about.argument("overlap_moe_expert_parallel_comm")
    if checked and (_is_older(about) or (tp > 1 and _before(about.machine.release, "0.13"))):
        yield Finding(
            "error", who, f"Megatron-LM refuses {flag} with any value but 1", f"export {CONNECTIONS}=1"
        )
    elif about.platform == "npu" and checked:
        yield Finding(
            "warning",
            who,
            f"Megatron-LM may refuse {flag} with any value but 1; on an NPU it has no other effect",
            f"export {CONNECTIONS}=1",
        )
    elif about.platform == "cuda" and _is_older(about) and tp > 1 and not checked:
        yield Finding(
            "warning",
            who,
            "before Blackwell, collectives of tensor parallel layers may start behind the matmul that hides "
            "them",
            f"export {CONNECTIONS}=1",
        )


def _is_older(about: Surroundings) -> bool:
    """Return whether Megatron takes this for a device before Blackwell, as it takes a CPU for one."""
    if about.platform == "cpu":
        return True
    return about.machine.architecture is not None and about.machine.architecture < _BLACKWELL


def find_launches(about: Surroundings) -> Iterator[Finding]:
    """Yield launches that wait for the device."""
    name = "ASCEND_LAUNCH_BLOCKING" if about.platform == "npu" else "CUDA_LAUNCH_BLOCKING"
    if not about.is_set(name):
        return
    queue = about.platform == "npu" and about.variable("TASK_QUEUE_ENABLE") not in ("", "0")
    yield Finding(
        "warning",
        f"{name}={about.variable(name)}",
        "the host waits for each operator"
        + (f", so that nothing hides {about.hidden}" if about.overlaps else "")
        + (f", and TASK_QUEUE_ENABLE={about.variable('TASK_QUEUE_ENABLE')} does nothing" if queue else ""),
        f"unset {name}",
    )


def find_task_queue(about: Surroundings) -> Iterator[Finding]:
    """Yield a queue of launches that is off beside transfers that the host has to launch ahead."""
    if about.variable("TASK_QUEUE_ENABLE") == "0" and about.overlaps:
        yield Finding(
            "warning",
            "TASK_QUEUE_ENABLE=0",
            f"one thread of the host prepares and launches all operators, and may come too late to hide "
            f"{about.hidden}",
            "export TASK_QUEUE_ENABLE=2",
        )


def find_uncached(about: Surroundings) -> Iterator[Finding]:
    """Yield an allocator that asks the driver for every tensor."""
    name = f"PYTORCH_NO_{'NPU' if about.platform == 'npu' else 'CUDA'}_MEMORY_CACHING"
    if about.variable(name):
        yield Finding(
            "warning",
            f"{name}={about.variable(name)}",
            "each tensor is allocated and freed by the driver, which waits for the device",
            f"unset {name}",
        )


def find_graphs(about: Surroundings) -> Iterator[Finding]:
    """Yield expandable segments in graphs whose buffers NCCL registers."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    used = next((name for name in names if "expandable_segments:True" in about.variable(name)), "")
    graphs = about.argument("cuda_graph_impl") == "transformer_engine"
    if used and graphs and about.variable("NCCL_GRAPH_REGISTER") != "0":
        yield Finding(
            "error",
            f"{used}={about.variable(used)}",
            "NCCL registers buffers of --cuda-graph-impl transformer_engine, and with expandable segments "
            "reads memory that is not theirs any more; Megatron-LM refuses it",
            "export NCCL_GRAPH_REGISTER=0",
        )


def find_nondeterminism(about: Surroundings) -> Iterator[Finding]:
    """Yield variables without which --deterministic-mode is refused, or fails in the first step."""
    if not (about.argument("deterministic_mode") and about.checked_by_megatron):
        return
    who = "--deterministic-mode"
    algorithm = about.variable("NCCL_ALGO")
    if _before(about.machine.release, "0.19"):
        if algorithm not in _ALGORITHMS:
            yield Finding(
                "error",
                who,
                f"Megatron-LM refuses it with NCCL_ALGO {algorithm or 'not set'}",
                "export NCCL_ALGO=Ring",
            )
    elif algorithm and not all(each.strip() in _ALGORITHMS_LATER for each in algorithm.split(",")):
        yield Finding(
            "error", who, f"Megatron-LM refuses it with NCCL_ALGO={algorithm}", "export NCCL_ALGO=Ring"
        )
    if about.platform != "cuda":
        return
    # From 0.19 on Megatron-LM sets both of these where they are not set.
    given = about.variable("CUBLAS_WORKSPACE_CONFIG")
    unset = not given and _before(about.machine.release, "0.19")
    if unset or (given and given not in _WORKSPACES):
        yield Finding(
            "error",
            who,
            f"PyTorch refuses products of matrices with CUBLAS_WORKSPACE_CONFIG {given or 'not set'}",
            "export CUBLAS_WORKSPACE_CONFIG=:4096:8",
        )
    engine = about.argument("transformer_impl") == "transformer_engine"
    given = about.variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    unset = not given and _before(about.machine.release, "0.19")
    if engine and (unset or (given and given != "0")):
        yield Finding(
            "error",
            who,
            "Megatron refuses Transformer Engine's attention with NVTE_ALLOW_NONDETERMINISTIC_ALGO "
            f"{given or 'not set'}",
            "export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
        )


CHECKS = (
    EnvironmentCheck(
        "device-connections",
        f"`{CONNECTIONS}`",
        "Megatron-LM refuses the layout with it (1 with tensor or context parallelism before Blackwell, any "
        "other value with an FSDP), or hides less with it",
        "Megatron-LM 0.12.1 to 0.19, `training/arguments.py` and `core/tensor_parallel/layers.py`",
        ("error", "warning"),
        find_connections,
    ),
    EnvironmentCheck(
        "launch-blocking",
        "`CUDA_LAUNCH_BLOCKING`, `ASCEND_LAUNCH_BLOCKING`",
        "set",
        "CUDA C++ programming guide; torch_npu, environment variables",
        ("warning",),
        find_launches,
        platforms=("cuda", "npu"),
    ),
    EnvironmentCheck(
        "task-queue",
        "`TASK_QUEUE_ENABLE`",
        "0, and transfers are hidden behind computation",
        "torch_npu, environment variables",
        ("warning",),
        find_task_queue,
        platforms=("npu",),
    ),
    EnvironmentCheck(
        "memory-caching",
        "`PYTORCH_NO_CUDA_MEMORY_CACHING`, `PYTORCH_NO_NPU_MEMORY_CACHING`",
        "set",
        "PyTorch, CUDA semantics; torch_npu, environment variables",
        ("warning",),
        find_uncached,
        platforms=("cuda", "npu"),
    ),
    EnvironmentCheck(
        "graph-allocator",
        "`PYTORCH_CUDA_ALLOC_CONF`, `NCCL_GRAPH_REGISTER`",
        "expandable segments beside `--cuda-graph-impl transformer_engine`",
        "Megatron-LM from 0.16 on, `training/arguments.py`",
        ("error",),
        find_graphs,
        platforms=("cuda",),
    ),
    EnvironmentCheck(
        "deterministic-mode",
        "`NCCL_ALGO`, `CUBLAS_WORKSPACE_CONFIG`, `NVTE_ALLOW_NONDETERMINISTIC_ALGO`",
        "`--deterministic-mode` with a value, or without one, that Megatron-LM or PyTorch refuses",
        "Megatron-LM, `training/arguments.py` and from 0.19 on `training/determinism.py`; PyTorch, "
        "`use_deterministic_algorithms`",
        ("error",),
        find_nondeterminism,
    ),
)
