"""Ascend NPUs: torch_npu with its redirection of ``torch.cuda``, and the environment variables that it reads.

Importing this does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.platforms.cuda import CudaPlatform
from mindspeed_dsa.platforms.npu_operators import product_of
from mindspeed_dsa.platforms.npu_releases import cann_here, disagreements, installed_cann

if TYPE_CHECKING:
    import torch

_INSTALL = "install the torch_npu release that matches your torch (pip install torch_npu==<torch version>)"
_CANN = (
    "install the CANN toolkit and source its set_env.sh (it puts CANN's libraries on "
    "LD_LIBRARY_PATH), and check the driver with npu-smi info"
)


class NpuPlatform(CudaPlatform):
    """Platform of Ascend NPUs: one per process, with HCCL. ``torch.npu`` has ``torch.cuda``'s interface."""

    name = "npu"
    device_type = "npu"
    backend = "hccl"
    mapped_by_kernels_only = True

    @property
    def _module(self) -> Any:
        return _torch_npu().npu

    def is_available(self) -> bool:
        return find_spec("torch_npu") is not None and bool(self._module.is_available())

    def prepare(self) -> None:
        """Import torch_npu and its ``transfer_to_npu``, which redirects ``torch.cuda`` calls to the NPU.

        The redirection is torch_npu's own and cannot be undone. If the environment does not set the device
        capability, it is set here.

        Raises:
            SettingsError: torch_npu is missing, does not load, or sees no NPU.
        """
        if not _torch_npu().npu.is_available():
            raise SettingsError(f"platform npu: torch_npu is there but sees no NPU; {_CANN}")
        # Without it torch.cuda.get_device_capability() returns None, whose first number torch 2.13 and
        # Megatron-LM read.
        os.environ.setdefault(_CAPABILITY.name, _CAPABILITY.recommended)
        import_module("torch_npu.contrib.transfer_to_npu")
        # torch_npu 2.9 leaves torch.cuda.default_generators empty; Megatron sets random states through it.
        # _lazy_call defers this until the device is initialised.
        self._module._lazy_call(self._share_generators)

    def _share_generators(self) -> None:
        import torch

        torch.cuda.default_generators = self._module.default_generators

    def facts(self) -> dict[str, Any]:
        """Return CANN's release, the product with its limits, and environment variables with advice."""
        product = product_of(self.device_name())
        return {
            "CANN": cann_here(),
            "product": product.name,
            "limits": product.limits(),
            "environment": environment(),
        }

    def empty_pinned(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return torch_npu's pinned memory. Its rounding to larger sizes is not visible in the storage."""
        import torch

        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)

    def release_pinned(self) -> None:
        """Do nothing: torch_npu keeps its pinned memory."""

    def empty_mapped(self, size: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
        """Return torch_npu's swapped memory, which the driver allocates outside of the pool."""
        swapped: torch.Tensor = _torch_npu().empty_with_swapped_memory(
            list(size), dtype=dtype, device=self.device
        )
        return swapped

    def read_mapped(self, mapped: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host. Swapped memory cannot be copied directly, so a kernel reads it."""
        # ones * mapped: torch_npu's manual supports swapped memory as a factor of a device tensor.
        import torch

        return torch.ones(mapped.shape, dtype=mapped.dtype, device=mapped.device).mul_(mapped).cpu()

    def write_mapped(self, mapped: torch.Tensor, values: torch.Tensor) -> None:
        """Write with a multiplication kernel, because swapped memory cannot be the destination of a copy."""
        mapped.fill_(1).mul_(values.to(mapped.device))


def _torch_npu() -> Any:
    if find_spec("torch_npu") is None:
        raise SettingsError(f"platform npu: torch_npu is not installed; {_INSTALL}")
    try:
        return import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise SettingsError(f"platform npu: {not_loaded(error)}") from error


def not_loaded(error: BaseException) -> str:
    """Describe why torch_npu fails to import, with a remedy."""
    torch, torch_npu = versions.of_package("torch"), versions.of_package("torch_npu")
    mismatch = next(disagreements(torch, torch_npu, installed_cann(os.environ)), None)
    cure = _CANN if mismatch is None else f"{mismatch.what}: {mismatch.do}"
    return f"torch_npu {torch_npu} does not load ({error}); {cure}"


# Environment variables that affect speed and memory on NPUs. Sources: the manuals of torch_npu, CANN and
# HCCL, and MindSpeed-LLM's training script for DeepSeek-V3.2.

UNSET = "not set"
_MANUAL, _SCRIPT = "manual", "MindSpeed-LLM"


@dataclass(frozen=True)
class Variable:
    """Environment variable that affects speed or memory on NPUs.

    Attributes:
        name: variable's name.
        does: effect, as a clause that begins with a verb.
        recommended: recommended value, or :data:`UNSET`.
        why: reason for the recommendation.
        sources: documents that give the recommendation.
        accepts: function that returns whether a value is at least as good as the recommended one.
    """

    name: str
    does: str
    recommended: str
    why: str
    sources: tuple[str, ...]
    accepts: Callable[[str], bool] = lambda value: False

    def said_of(self, value: str | None) -> str:
        """Return a text with the variable's value, and with the recommended value if the two differ.

        Args:
            value: current value, ``None`` if not set.
        """
        shown = UNSET if value is None else value
        if shown == self.recommended or (value is not None and self.accepts(value)):
            return shown
        wanted = "leave it out" if self.recommended == UNSET else f"{self.recommended} is recommended"
        return f"{shown}; {wanted}: {self.why}"


def _at_least(seconds: int) -> Callable[[str], bool]:
    return lambda value: value.isdigit() and int(value) >= seconds


_CAPABILITY = Variable(
    "TORCH_NPU_DEVICE_CAPABILITY",
    "is what `torch.cuda.get_device_capability()` says. Where it is not set this package sets it",
    "8.0",
    "torch_npu says None otherwise, of which broadcasts of torch 2.13 and Megatron-LM's check of "
    "`--moe-grouped-gemm` take the first number",
    ("Megatron-LM",),
    lambda value: True,
)

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "TASK_QUEUE_ENABLE",
        "hands operators to a second thread of the host, which launches them; 2 moves their workspaces "
        "there, too. It does nothing beside `ASCEND_LAUNCH_BLOCKING=1`",
        "2",
        "the host runs ahead of the device; the peak of memory may rise",
        (_MANUAL, _SCRIPT),
    ),
    Variable(
        "CPU_AFFINITY_CONF",
        "binds each process to the processor cores of its device; 2 gives the busiest threads cores of their "
        "own, which the manual prefers where nothing else needs them",
        "1",
        "processes do not take each other's cores; where a container has fewer cores than the machine add "
        "`,force:1`",
        (_MANUAL, _SCRIPT),
        lambda value: value[:1] in ("1", "2"),
    ),
    Variable(
        "STREAMS_PER_DEVICE",
        "sets how many streams torch_npu's pool has before streams share one queue; 8 or 32",
        "32",
        "swaps, overlapped gathers and chunked transfers have streams of their own; torch_npu up to mid 2025 "
        "has 8 by default",
        (_MANUAL, _SCRIPT),
    ),
    Variable(
        "PYTORCH_NPU_ALLOC_CONF",
        "configures torch_npu's allocators. With `--swap-optimizer` add `pinned_max_round_threshold_mb:128` "
        "where torch_npu knows it (2.13 does): larger pinned buffers are not rounded up to a power of two",
        "expandable_segments:True",
        "fewer fragments where sizes change from step to step",
        (_MANUAL, _SCRIPT),
        lambda value: "expandable_segments:True" in value,
    ),
    Variable(
        "HCCL_CONNECT_TIMEOUT",
        "limits the seconds in which ranks must reach the same communicator, 120 to 7200, 120 by default",
        "3600",
        "ranks that load checkpoints or compile at different speed are waited for",
        (_MANUAL, _SCRIPT),
        _at_least(300),
    ),
    Variable(
        "HCCL_EXEC_TIMEOUT",
        "limits the seconds for which a rank waits in a collective for the others, 1836 by default; 0 is for "
        "ever. In `AIV` mode 1091 is the most",
        "3600",
        "a rank that alone writes a checkpoint is waited for; the manual wants the groups' own time-out "
        "above it, 10 minutes by default: `--distributed-timeout-minutes 70`",
        (_MANUAL, _SCRIPT),
        lambda value: value == "0" or _at_least(1836)(value),
    ),
    Variable(
        "TORCH_HCCL_ZERO_COPY",
        "1 has collectives read and write tensors where they are, without a copy in HCCL's buffer. Atlas A3 "
        "alone has it, and it needs `PYTORCH_NPU_ALLOC_CONF=expandable_segments:True`",
        UNSET,
        "the manual calls it experimental; MindSpeed-LLM's script for Atlas A3 sets 1",
        (_MANUAL, _SCRIPT),
        lambda value: value in ("0", "1"),
    ),
    Variable(
        "HCCL_OP_EXPANSION_MODE",
        "chooses what unfolds a collective into transfers: the host (default of Atlas A2), the AI CPU "
        "(`AI_CPU`, default of Atlas A3) or the vector cores (`AIV`)",
        UNSET,
        "the manual allows AIV for inference, and not beside communicators that run at the same time, of "
        "which a training job has several",
        (_MANUAL,),
        lambda value: value != "AIV",
    ),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "does nothing on an NPU; Megatron-LM's arguments demand it with tensor or context parallelism",
        "1",
        "Megatron-LM may refuse the job without it",
        (_SCRIPT, "Megatron-LM"),
    ),
    _CAPABILITY,
)


def environment() -> dict[str, str]:
    """Return a dict from environment variable to text: current value, and recommended value if it differs."""
    return {variable.name: variable.said_of(os.environ.get(variable.name)) for variable in VARIABLES}
