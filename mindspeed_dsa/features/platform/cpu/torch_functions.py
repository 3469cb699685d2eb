"""Replacements of ``torch.cuda`` functions and tensor calls for CUDA, on the CPU platform.

Every function here takes the arguments of the one it replaces.
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

__all__ = ["CpuEvent", "CpuStream"]  # named by patch rows

_CPU = torch.device("cpu")
_Function = Callable[..., Any]

_TABLES = ("torch.utils._device:_device_constructors", "torch.jit._builtins:_get_builtin_table")


def fill_tables() -> None:
    """Have torch fill two tables now that it would fill on first use, from the current values of its names.

    They are the functions that ``with torch.device(...)`` acts on, and the operators that
    ``torch.jit.script`` knows. They must hold the originals, which is what torch passes to the first and what
    remains when the patches are undone. A torch without such a table has nothing to fill.
    """
    for table in _TABLES:
        module, _, name = table.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            getattr(import_module(module), name)()


fill_tables()


# -- device --------------------------------------------------------------------------------------


def current_device() -> torch.device:
    """Return the CPU; a device rather than an index, so that ``device=torch.cuda.current_device()`` works."""
    return _CPU


def device_count() -> int:
    """Count one device per process."""
    return 1


def available_as_before(original: Callable[[], bool]) -> Callable[[], bool]:
    """Decorate ``is_available``: what it answers before any other function is redirected."""
    available = original()

    def is_available() -> bool:
        return available

    return is_available


def set_device(device: Any) -> None:
    """Do nothing: there is only one device."""


def synchronize(device: Any = None) -> None:
    """Do nothing: host work is complete when its call returns."""


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return no CUDA architecture."""
    return (0, 0)


# -- memory, in bytes ----------------------------------------------------------------------------


def memory_current(device: Any = None) -> int:
    """Return the resident set of the process."""
    return host_pool.process_memory().current


def memory_peak(device: Any = None) -> int:
    """Return the peak resident set of the process since the last reset."""
    return host_pool.process_memory().peak


def reset_peak(device: Any = None) -> None:
    """Reset the peak."""
    host_pool.reset_peak_memory()


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """Return the resident set and its peak under the CUDA allocator's keys; there are no counts of blocks."""
    memory = host_pool.process_memory()
    stats: OrderedDict[str, int] = OrderedDict()
    for pool in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{pool}.all.current"] = memory.current
        stats[f"{pool}.all.peak"] = memory.peak
    stats["allocation.all.current"] = stats["allocation.all.peak"] = 0
    return stats


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return free and total memory of the host."""
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
    """Return false: there are no CUDA graphs."""
    return False


# -- random numbers: one generator serves host and device ----------------------------------------


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """Return the state of the CPU generator (uint8)."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set the CPU generator."""
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices: one."""
    return [torch.get_rng_state()]


def set_rng_state_all(new_states: Any) -> None:
    """Set the states of all devices."""
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
    """Map a CUDA device (also given as an index) to the CPU; return anything else unchanged."""
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def factory_on_host(original: _Function) -> _Function:
    """Decorate a function that creates tensors and takes ``device`` and ``pin_memory`` by keyword."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_host(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return make


def tensor_to_host(original: _Function) -> _Function:
    """Decorate ``Tensor.to``."""

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_host(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_host(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace ``Tensor.cuda``: the tensor itself, as a CUDA tensor would return itself."""
    return self if self.device.type == "cpu" else self.to(_CPU)


def tensor_pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Replace ``Tensor.pin_memory``: a copy, like the original, but not pinned."""
    return self.clone()


def tensor_record_stream(self: torch.Tensor, stream: Any) -> None:
    """Replace ``Tensor.record_stream``: no queue outlives a tensor here."""


# -- torch's own machinery -----------------------------------------------------------------------


def group_over_gloo(original: _Function) -> _Function:
    """Decorate ``init_process_group`` and ``new_group``: a backend that names NCCL becomes gloo."""
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
    """Decorate ``torch.jit``'s look-up of operators, which goes by identity of the function."""

    def find_builtin(function: Any) -> Any:
        found = original(function)
        return original(_builtin_behind(function)) if found is None else found

    return find_builtin


def load_redirected_builtin(original: _Function) -> _Function:
    """Decorate the reader of torch.compile's table of known functions, which may be filled now.

    The table is for operators: it gets those that the factories here call, and none of our functions, so that
    torch.compile traces into it.
    """

    def load_object(name: str) -> Any:
        found = original(name)
        ours = isinstance(found, FunctionType) and found.__code__.co_filename == __file__
        return _builtin_behind(found) if ours else found

    return load_object


def _builtin_behind(function: Any) -> Any:
    """Return the operator that a redirected factory calls; ``None`` for anything else."""
    name = getattr(function, "__name__", "")
    if isinstance(function, FunctionType) and vars(torch).get(name) is function:
        return getattr(getattr(torch._C, "_VariableFunctions", None), name, None)
    return None
