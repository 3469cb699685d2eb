"""CUDA graphs without a GPU: a capture that fails on synchronisation, and a replay of what it captured.

The rules of a capture on CUDA hold for tensors on the CPU:

* a capture runs nothing: tensors that it makes have no content before a replay, and tensors that it changes
  keep their content;
* a replay repeats the captured operators and launches of Triton on the same memory, and runs no Python;
* an operator that reads the device on the host, or copies from the host, fails the capture.

Whether a tensor is on the host is decided as in :mod:`tests.npu.counting`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.npu import counting

_TESTS = str(Path(__file__).parents[1])
_OURS = str(Path(__file__).parents[2] / "mindspeed_dsa")


class NotCapturable(RuntimeError):
    """The captured code reads the device, copies from the host, or changes the size of memory."""


class Graph:
    """Stand-in for ``torch.cuda.CUDAGraph``, with the same methods as far as Megatron calls them."""

    def __init__(self, **unused: Any) -> None:
        self._steps: list[_Step] = []

    @property
    def operators(self) -> list[str]:
        """Names of the captured operators and kernels, in order."""
        return [step.name for step in self._steps]

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Accept a generator; captured code must not draw random numbers here."""

    def replay(self) -> None:
        """Repeat what was captured, on the same memory."""
        assert self._steps, "a graph was replayed that captured nothing"
        with torch.no_grad():
            for step in self._steps:
                step.repeat()

    def reset(self) -> None:
        """Forget what was captured."""
        self._steps = []


class _Step:
    def __init__(self, name: str, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        self.name, self.function, self.args, self.kwargs = name, function, args, kwargs
        inputs = {_storage(leaf) for leaf in _tensors((args, kwargs))}
        self.results = results
        self.is_new = [_storage(leaf) not in inputs for leaf in _tensors(results)]

    @property
    def new(self) -> list[Tensor]:
        """Results in memory of their own."""
        return [leaf for leaf, new in zip(_tensors(self.results), self.is_new, strict=True) if new]

    def repeat(self) -> None:
        # Below autograd, because memory that autograd has saved is written again.
        with torch._C._AutoDispatchBelowAutograd():
            again = self.function(*self.args, **self.kwargs)
            for old, result, new in zip(_tensors(self.results), _tensors(again), self.is_new, strict=True):
                assert old.shape == result.shape, self.name
                if new:
                    old.data.copy_(result)


class _Watch(counting._Watch):
    """Raises at the first event that a capture forbids."""

    def add(self, kind: str, what: str, tensor: Tensor) -> None:
        if kind in ("host_reads", "uploads"):
            how = "reads the device on the host" if kind == "host_reads" else "copies from the host"
            raise NotCapturable(f"{what} of {list(tensor.shape)} {how} at {_place()}")


class _Operators(counting._Operators):
    """Mode for operators, by the rules of CUDA."""

    def _count(self, name: str, func: Any, inputs: list[Tensor], made: list[Tensor]) -> None:
        # CUDA writes one number through a mask without reading the mask on the host.
        if name not in ("index_put", "index_put_") or inputs[-1].numel() != 1:
            super()._count(name, func, inputs, made)


class _Tape(TorchDispatchMode):
    """Appends operators to a graph, and restores at the end what they changed."""

    def __init__(self, graph: Graph, watch: _Watch) -> None:
        super().__init__()
        self._graph, self._watch = graph, watch
        self._made: dict[int, Any] = {}
        # Copies of memory from before the capture.
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Attention without dropout draws nothing, and empty memory only looks random.
        draws_nothing = any(part in func.name() for part in ("empty", "scaled_dot_product"))
        if torch.Tag.nondeterministic_seeded in func.tags and not draws_nothing:
            raise NotCapturable(f"{func.name()} draws random numbers at {_place()}")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                self._save(_tensors(given))
        results = func(*args, **kwargs)
        self._append(_Step(func.name(), func, args, kwargs, results))
        return results

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Any:
        """Return a function that launches a Triton kernel and records the launch."""

        def launch(*args: Any, **constants: Any) -> None:
            self._save(_tensors(args))
            start = kernel[grid]

            def call(*args: Any, **constants: Any) -> None:
                with _disable_current_modes():
                    start(*args, **constants)

            self._watch.hidden = True
            try:
                call(*args, **constants)
            finally:
                self._watch.hidden = False
            self._append(_Step(kernel.__name__, call, args, constants, None))

        return launch

    def _save(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._before:
                with _disable_current_modes():
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self._before[storage._cdata] = (whole, whole.clone())

    def _append(self, step: _Step) -> None:
        for tensor in step.new:
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = storage  # kept alive, so that no address is used again
        self._graph._steps.append(step)

    def undo(self) -> None:
        """Restore all memory from before the capture, and fill new memory with NaN or a large number."""
        for whole, before in self._before.values():
            whole.copy_(before)
        for step in self._graph._steps:
            for tensor in step.new:
                if self._watch.on_device(tensor):
                    _spoil(tensor)


@contextmanager
def in_place_of_cuda() -> Iterator[list[Graph]]:
    """Replace the functions of ``torch.cuda`` with which Megatron captures graphs; yield the graphs made."""
    made: list[Graph] = []

    def graph(**options: Any) -> Graph:
        made.append(Graph())
        return made[-1]

    functions = {
        "CUDAGraph": graph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 1),
        "default_generators": (),
    }
    allocator = {
        "_cuda_beginAllocateCurrentThreadToPool": lambda *pool: None,
        "_cuda_endAllocateToPool": lambda *pool: None,
    }
    with ExitStack() as stack:
        for where, replaced in ((torch.cuda, functions), (torch._C, allocator)):
            for name, function in replaced.items():
                stack.enter_context(mock.patch.object(where, name, function, create=True))
        stack.enter_context(mock.patch.object(torch.cuda, "device_count", return_value=0))
        yield made


@contextmanager
def capture(graph: Graph, **unused: Any) -> Iterator[None]:
    """Stand in for ``torch.cuda.graph``.

    Raises:
        NotCapturable: the block synchronises with the device, copies from the host, resizes memory or draws
            random numbers.
    """
    watch = _Watch(counting.Counts(), 0)
    tape = _Tape(graph, watch)

    def resize(storage: Any, size: int) -> None:
        raise NotCapturable(f"memory changes its size at {_place()}")

    with ExitStack() as stack:
        for module in [m for name, m in sys.modules.items() if name.startswith("mindspeed_dsa.ops.")]:
            if hasattr(module, "on_grid"):
                grid = lambda kernel, *grid: tape.launch(kernel, grid)  # noqa: E731
                stack.enter_context(mock.patch.object(module, "on_grid", grid))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        for mode in (counting._Functions(watch), _Operators(watch), tape):
            stack.enter_context(mode)
        yield
    tape.undo()


def _spoil(tensor: Tensor) -> None:
    # Not an in-place change for autograd, which has saved such memory for a backward to be captured.
    content = tensor.data
    if content.is_floating_point() or content.is_complex():
        content.fill_(torch.nan)
    elif content.dtype == torch.bool:
        content.logical_not_()
    else:
        content.fill_(113)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place() -> str:
    """Return the innermost lines of this library, of Megatron or of a test."""
    frame = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        inside = name.startswith((_TESTS, _OURS)) or "/megatron/core/" in name
        if inside and name not in (__file__, counting.__file__):
            found.append(f"{'/'.join(name.split('/')[-3:])}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "a backward pass"
