"""Replacements for what Megatron asks of CUDA, on CPUs and on NPUs: names of types, kernels, compilers, NVML.

Imports nothing of Megatron: fetched while Megatron is being imported.
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
"""Prefixes of the names of types, by the type of their device."""


class _TypeName(str):
    """Name such as ``torch.npu.FloatTensor`` that also equals ``torch.cuda.FloatTensor``."""

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
    """Decorate ``Tensor.type``, both as a query and as a conversion; tensors elsewhere keep their names."""
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
    """Return the bytes of the device's memory that all processes use; on a CPU the host's."""
    memory = platforms.current().memory()
    return memory.total - memory.free


class _NoNvtx:
    """Functions of torch's NVTX binding that ignore range markers."""

    @staticmethod
    def _forget(*args: Any) -> int:
        return 0

    rangePushA = rangePop = rangeStartA = rangeEnd = markA = _forget
    deviceRangeStart = deviceRangeEnd = _forget


NO_NVTX = _NoNvtx()


# -- Megatron ------------------------------------------------------------------------------------


def jit_fuser(context: Context[None]) -> _Function:
    """Return what stands for ``jit_fuser``: torch.compile on an NPU with its own Triton, else nothing."""
    if platforms.current().name == "npu" and _has_triton_ascend():
        return torch.compile
    return run_eagerly


def run_eagerly(function: _Function) -> _Function:
    """Return the function itself, in the place of a compiled one."""
    return function


def _has_triton_ascend() -> bool:
    # Asked for as a distribution: it is imported as `triton`, as NVIDIA's is.
    try:
        distribution("triton-ascend")
    except PackageNotFoundError:
        return False
    return True


def no_softmax_kernel(self: Any, mask: Any, b: int, np: int, sq: int, sk: int) -> bool:
    """Replace ``FusedScaleMaskSoftmax.is_kernel_available``: there is none."""
    return False


def no_nccl_options(pg_name: str, nccl_comm_cfgs: Any) -> None:
    """Replace ``get_nccl_options``: a group has none, whatever is asked of NCCL.

    Megatron asks for a stream of high priority with ``--use-torch-fsdp2``, ``--high-priority-stream-groups``
    and ``--nccl-communicator-config-path``. torch_npu gives no group of HCCL such a stream, also where its
    options say so.
    """


def no_device_arch() -> int:
    """Replace ``get_device_arch_version``: no CUDA architecture."""
    return 0


def no_kernels_to_load(args: Any) -> None:
    """Replace ``fused_kernels.load``, which calls nvcc."""
