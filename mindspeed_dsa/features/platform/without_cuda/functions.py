"""Replacements for CUDA names, kernels, compilers and NVML that Megatron uses, for CPUs and NPUs.

Does not import Megatron, because Megatron is being imported when this module is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import torch

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context

_Function = Callable[..., Any]

_CUDA = "torch.cuda."
_PREFIXES = {"cpu": "torch.", "npu": "torch.npu."}
"""Dict from device type to the prefix of its tensor type names."""


class _TypeName(str):
    """Tensor type name such as ``torch.npu.FloatTensor`` that also equals ``torch.cuda.FloatTensor``."""

    __slots__ = ("prefix",)
    prefix: str
    __hash__ = str.__hash__

    def __new__(cls, name: str, prefix: str) -> _TypeName:
        made = super().__new__(cls, name)
        made.prefix = prefix
        return made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return str.__eq__(self, str.replace(other, _CUDA, self.prefix, 1))
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other


def type_as_on_cuda(original: _Function) -> _Function:
    """Decorate ``Tensor.type`` to return names that equal CUDA's, and to accept CUDA's names."""
    device_type = platforms.current().device_type
    prefix = _PREFIXES[device_type]

    def type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name = original(self)
            return _TypeName(name, prefix) if self.device.type == device_type else name
        if isinstance(dtype, str):
            dtype = str(dtype).replace(_CUDA, prefix, 1)
        return original(self, dtype, non_blocking, **kwargs)

    return type


def device_memory_used(device: Any = None) -> int:
    """Return the device memory (on a CPU: host memory) in use by all processes, in bytes."""
    memory = platforms.current().memory()
    return memory.total - memory.free


class _NoNvtx:
    """Replacement for torch's NVTX binding that ignores range markers."""

    @staticmethod
    def _forget(*args: Any) -> int:
        return 0

    rangePushA = rangePop = rangeStartA = rangeEnd = markA = _forget
    deviceRangeStart = deviceRangeEnd = _forget


NO_NVTX = _NoNvtx()


# -- Megatron ------------------------------------------------------------------------------------


def jit_fuser(context: Context[None]) -> _Function:
    """Return Megatron's ``jit_fuser``: torch.compile on NPUs with Ascend's Triton, else run eagerly."""
    if platforms.current().name == "npu" and _has_triton_ascend():
        return torch.compile
    return lambda function: function


def _has_triton_ascend() -> bool:
    # Look for the distribution: the module is called `triton`, like NVIDIA's.
    try:
        distribution("triton-ascend")
    except PackageNotFoundError:
        return False
    return True


def no_softmax_kernel(self: Any, mask: Any, b: int, np: int, sq: int, sk: int) -> bool:
    """Return false (no fused kernel); replaces ``FusedScaleMaskSoftmax.is_kernel_available``."""
    return False


def no_nccl_options(pg_name: str, nccl_comm_cfgs: Any) -> None:
    """Return no options; replaces ``get_nccl_options``."""
    # Megatron requests a high priority stream with --use-torch-fsdp2, --high-priority-stream-groups and
    # --nccl-communicator-config-path. torch_npu ignores this option for HCCL groups.


def no_device_arch() -> int:
    """Return 0 (no CUDA architecture); replaces ``get_device_arch_version``."""
    return 0


def no_kernels_to_load(args: Any) -> None:
    """Do nothing; replaces ``fused_kernels.load``, which calls nvcc."""
