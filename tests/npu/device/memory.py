"""NPU tensors of the stand-in as CPU tensors: two devices share the same memory."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

_runtime = ctypes.CDLL("libascendcl.so")


def is_npu(value: object) -> bool:
    """Return whether it is a tensor on an NPU."""
    return isinstance(value, Tensor) and value.device.type == "npu"


def on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor with the same shape, strides and memory as an NPU tensor's."""
    address = tensor.data_ptr()
    if not tensor.numel() or not tensor.untyped_storage().nbytes():  # empty, or freed by FSDP2
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory, start = _memory(tensor.dtype)
    place = address - start
    if not 0 <= place < memory.nbytes:  # host memory that is mapped for the device
        return _mapped(tensor)
    return memory.as_strided(tensor.shape, tensor.stride(), place // tensor.dtype.itemsize)


def _mapped(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(buffer, dtype=tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def to_npu(tensor: Tensor) -> Tensor:
    """Return an NPU tensor on the current device with a CPU tensor's values; not counted as a copy."""
    device = torch.device("npu", torch.npu.current_device())
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    on_host(made).copy_(tensor)
    return made


@functools.cache
def _memory(dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return the whole device memory as one tensor, and its first address."""
    start = ctypes.c_void_p.in_dll(_runtime, "stand_in_memory").value
    size = ctypes.c_size_t.in_dll(_runtime, "stand_in_memory_size").value
    assert start, "nothing has been allocated on the stand-in NPU yet"
    buffer = (ctypes.c_char * size).from_address(start)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype), start
