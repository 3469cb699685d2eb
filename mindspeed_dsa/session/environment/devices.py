"""Checks of environment variables of devices and their allocators.

Variables that Megatron-LM itself checks a few seconds later are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_dsa.environment import EnvironmentCheck, Finding, Surroundings
from mindspeed_dsa.megatron.configuration import argument

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_BLACKWELL = 10  # major compute capability


def _sharded(about: Surroundings) -> str:
    """Return the flag of the FSDP implementation that is on, or an empty string."""
    for name in ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"):
        if argument(about.args, name):
            return f"--{name.replace('_', '-')}"
    return ""


def find_connections(about: Surroundings) -> Iterator[Finding]:
    """Check ``CUDA_DEVICE_MAX_CONNECTIONS``: a wrong number of work queues exposes communication."""
    value, tp = about.variable(CONNECTIONS), about.size("tensor_model_parallel_size")
    older = about.machine.architecture is not None and about.machine.architecture < _BLACKWELL
    if fsdp := _sharded(about):
        if value == "1":
            yield Finding(
                "warning",
                f"{CONNECTIONS}=1",
                f"with one queue the gathers of {fsdp} wait behind the layers that should hide them",
                f"unset {CONNECTIONS}",
            )
    # Without tensor and context parallelism Megatron-LM does not require one queue.
    elif max(tp, about.size("context_parallel_size")) == 1:
        if value == "1" and about.argument("overlap_moe_expert_parallel_comm") and older:
            yield Finding(
                "warning",
                f"{CONNECTIONS}=1",
                "before Blackwell, --overlap-moe-expert-parallel-comm needs more queues for two streams",
                f"export {CONNECTIONS}=32",
            )
    elif value != "1" and tp > 1 and older:
        yield Finding(
            "warning",
            f"{CONNECTIONS} {value or 'not set'}",
            "before Blackwell, collectives of tensor parallel layers may start behind the matmul that hides "
            "them",
            f"export {CONNECTIONS}=1",
        )


def find_launches(about: Surroundings) -> Iterator[Finding]:
    """Check for ``*_LAUNCH_BLOCKING``, which makes the host wait for every kernel."""
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
    """Check for a disabled launch queue of torch_npu in jobs that overlap communication."""
    if about.variable("TASK_QUEUE_ENABLE") == "0" and about.overlaps:
        yield Finding(
            "warning",
            "TASK_QUEUE_ENABLE=0",
            f"one thread of the host prepares and launches all operators, and may come too late to hide "
            f"{about.hidden}",
            "export TASK_QUEUE_ENABLE=2",
        )


def find_uncached(about: Surroundings) -> Iterator[Finding]:
    """Check for a disabled caching allocator, which calls the driver for every tensor."""
    name = f"PYTORCH_NO_{'NPU' if about.platform == 'npu' else 'CUDA'}_MEMORY_CACHING"
    if about.variable(name):
        yield Finding(
            "warning",
            f"{name}={about.variable(name)}",
            "each tensor is allocated and freed by the driver, which waits for the device",
            f"unset {name}",
        )


CHECKS = (
    EnvironmentCheck(
        "device-connections",
        f"`{CONNECTIONS}`",
        "less is hidden with it: one queue for an FSDP or two streams, more than one for tensor parallel "
        "layers before Blackwell",
        "Megatron-LM 0.12.1 to 0.19, `core/tensor_parallel/layers.py`",
        ("warning",),
        find_connections,
        platforms=("cuda",),
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
)
