"""Replacements of ``torch.cuda`` functions and of tensor calls for CUDA, on the CPU platform.

Every replacement takes the arguments of the original.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

import torch

from mindspeed_dsa.platforms import cpu, host_pool
from mindspeed_dsa.platforms.cpu import CpuEvent, CpuStream

__all__ = ["CpuEvent", "CpuStream"]  # named in patch rows

_CPU = torch.device("cpu")
_Function = Callable[..., Any]

_TABLES = ("torch.utils._device:_device_constructors", "torch.jit._builtins:_get_builtin_table")


def fill_tables() -> None:
    """Make torch fill two lookup tables of its functions, before the functions are patched.

    torch fills each table on first use, from the functions that its names refer to at that time. One table
    lists the functions that ``with torch.device(...)`` affects, the other the operators of
    ``torch.jit.script``. Both must have the original functions: torch looks up originals in the first table,
    and the tables remain when the patches are undone.
    """
    # A release of torch without such a table has nothing to fill.
    for table in _TABLES:
        module, _, name = table.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            getattr(import_module(module), name)()


fill_tables()


# -- device --------------------------------------------------------------------------------------


def current_device() -> torch.device:
    """Return the CPU as a device, not an index, so that ``device=torch.cuda.current_device()`` works."""
    return _CPU


def device_count() -> int:
    """Return 1, for one device per process."""
    return 1


def available_as_before(original: Callable[[], bool]) -> Callable[[], bool]:
    """Decorate ``is_available`` to return its value from before any function was redirected."""
    available = original()

    def is_available() -> bool:
        return available

    return is_available


def set_device(device: Any) -> None:
    """Do nothing, because there is only one device."""


def synchronize(device: Any = None) -> None:
    """Do nothing, because host work is complete when its call returns."""


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return (0, 0), which is no CUDA architecture."""
    return (0, 0)


# -- memory, in bytes ----------------------------------------------------------------------------


def memory_current(device: Any = None) -> int:
    """Return the resident set size of the process."""
    return host_pool.process_memory().current


def memory_peak(device: Any = None) -> int:
    """Return the peak resident set size of the process since the last reset."""
    return host_pool.process_memory().peak


def reset_peak(device: Any = None) -> None:
    """Reset the peak resident set size."""
    host_pool.reset_peak_memory()


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """Return the resident set and its peak under the CUDA allocator's keys, with 0 for block counts."""
    memory = host_pool.process_memory()
    stats: OrderedDict[str, int] = OrderedDict()
    for pool in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{pool}.all.current"] = memory.current
        stats[f"{pool}.all.peak"] = memory.peak
    stats["allocation.all.current"] = stats["allocation.all.peak"] = 0
    return stats


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and total memory of the host."""
    memory = host_pool.process_memory()
    return memory.free, memory.total


# -- streams -------------------------------------------------------------------------------------


def stream(stream: Any) -> Any:
    """Return a context that makes ``stream`` the current one."""
    return cpu.use_stream(stream)


def set_stream(stream: Any) -> None:
    """Make ``stream`` the current one."""
    cpu.set_stream(stream)


def current_stream(device: Any = None) -> CpuStream:
    """Return the stream set last on this thread."""
    return cpu.current_stream()


def default_stream(device: Any = None) -> CpuStream:
    """Return the default stream."""
    return cpu.DEFAULT_STREAM


def never_capturing() -> bool:
    """Return false, because there are no CUDA graphs."""
    return False


# -- random numbers: one generator for host and device -------------------------------------------


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """Return the state of the CPU generator (uint8)."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set the CPU generator."""
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return a list with the state of the only device."""
    return [torch.get_rng_state()]


def set_rng_state_all(new_states: Any) -> None:
    """Set the state of the only device from a list."""
    (state,) = new_states
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    # torch.manual_seed would call this function again.
    torch.default_generator.manual_seed(int(seed))


def initial_seed() -> int:
    """Return the seed of the CPU generator."""
    return torch.initial_seed()


# -- tensors -------------------------------------------------------------------------------------


def on_host(device: Any) -> Any:
    """Map a CUDA device, given as object, name or index, to the CPU; return anything else unchanged."""
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def factory_on_host(original: _Function) -> _Function:
    """Decorate a tensor factory to create unpinned CPU tensors."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_host(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return make


def tensor_to_host(original: _Function) -> _Function:
    """Decorate ``Tensor.to`` to replace CUDA devices by the CPU."""

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_host(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_host(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the tensor itself, as ``Tensor.cuda`` does for CUDA tensors; replaces ``Tensor.cuda``."""
    return self if self.device.type == "cpu" else self.to(_CPU)


def tensor_pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return an unpinned copy; replaces ``Tensor.pin_memory``."""
    return self.clone()


def tensor_record_stream(self: torch.Tensor, stream: Any) -> None:
    """Do nothing, because host work on a tensor is complete when it is freed; replaces ``record_stream``."""


# -- torch's own machinery -----------------------------------------------------------------------


def group_over_gloo(original: _Function) -> _Function:
    """Decorate ``init_process_group`` and ``new_group`` to use gloo for any backend that names NCCL."""
    # Such as "nccl" or "cpu:gloo,cuda:nccl".
    position = list(inspect.signature(original).parameters).index("backend")

    def gloo_for(backend: Any) -> Any:
        return "gloo" if isinstance(backend, str) and "nccl" in backend.lower() else backend

    def make_group(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], gloo_for(args[position]), *args[position + 1 :])
        elif "backend" in kwargs:
            kwargs["backend"] = gloo_for(kwargs["backend"])
        if kwargs.get("device_id") is not None and on_host(kwargs["device_id"]) == _CPU:
            kwargs["device_id"] = None
        return original(*args, **kwargs)

    return make_group


def find_redirected_builtin(original: _Function) -> _Function:
    """Decorate ``torch.jit``'s operator lookup, which is by identity, to find patched functions too."""

    def find_builtin(function: Any) -> Any:
        found = original(function)
        return original(_builtin_behind(function)) if found is None else found

    return find_builtin


def load_redirected_builtin(original: _Function) -> _Function:
    """Decorate the reader of torch.compile's table of known functions to return the original operators."""
    # The table may be filled while patches are active. It lists functions that are not traced into, so it
    # must hold the operators behind our factories: torch.compile then traces into the factories.

    def load_object(name: str) -> Any:
        found = original(name)
        ours = isinstance(found, FunctionType) and found.__code__.co_filename == __file__
        return _builtin_behind(found) if ours else found

    return load_object


def _builtin_behind(function: Any) -> Any:
    """Return the operator that a redirected factory calls; ``None`` for other functions."""
    name = getattr(function, "__name__", "")
    if isinstance(function, FunctionType) and vars(torch).get(name) is function:
        return getattr(getattr(torch._C, "_VariableFunctions", None), name, None)
    return None
