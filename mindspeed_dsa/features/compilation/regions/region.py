"""Functions compiled with ``torch.compile`` as one full graph each, with a fallback to eager execution."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from mindspeed_dsa.feature import Context
from mindspeed_dsa.log import Log
from mindspeed_dsa.patches import versions

_modes = versions.private("torch._C:_len_torch_dispatch_stack", "--compile-regions")
_NOT_COMPILED = "torch.compile with fullgraph=True found no compiled frames"


class Region:
    """Function compiled once for all layers of a session, because weights are arguments.

    Attributes:
        name: name in messages.
        compilations: number of compiled graphs.
        seconds: total time of compilations.
        failure: reason why compilation failed, after which the function runs eagerly; None otherwise.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        rows: int,
        log: Log,
    ) -> None:
        self.name = name
        self.compilations = 0
        self.seconds = 0.0
        self.failure: str | None = None
        self._function = function
        self._rows = rows
        self._log = log
        self._compiled = torch.compile(function, fullgraph=True, backend=self._backend)

    def __call__(self, *args: Any) -> Any:
        """Return the function's result, compiled if possible.

        Under a ``TorchDispatchMode``, such as a FLOP counter, the function runs eagerly: the mode cannot see
        inside compiled code, and torch does not compile while a mode is active.
        """
        if self.failure is not None or _modes():
            return self._function(*args)
        if not torch.compiler.is_compiling():
            for rows in args[: self._rows]:
                open_rows(rows)
        try:
            return self._compiled(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self._give_up(error)
        except RuntimeError as error:
            if not str(error).startswith(_NOT_COMPILED):
                raise
            self._give_up(error)
        return self._function(*args)

    def _give_up(self, error: Exception) -> None:
        cause: BaseException = error
        # Dynamo stores a backend's exception in `inner_exception` instead of chaining it.
        while (inner := getattr(cause, "inner_exception", None) or cause.__cause__) is not None:
            cause = inner
        # The first line of the innermost error says why; the rest is a stack of the compiler.
        text = next((line.strip() for line in str(cause).splitlines() if line.strip()), "no reason given")
        self.failure = f"{type(cause).__name__}: {text}"
        self._log.warning(
            "the %s does not compile (%s) and runs as it is; TORCH_LOGS=dynamo,inductor says more",
            self.name,
            self.failure,
            ranks="all",
        )

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile forward and backward with Inductor."""
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        started = time.perf_counter()
        device = next(each.device.type for each in inputs if isinstance(each, Tensor))
        # Compile backward now, not at its first run: __call__ can only catch a failure in forward.
        with config.patch(force_non_lazy_backward_lowering=True):
            compiled = compile_fx(
                graph,
                inputs,
                # Round to bf16 after every operation, as the eager operators do.
                config_patches={"emulate_precision_casts": True, **inductor_settings(device)},
            )
        self.compilations += 1
        self.seconds += time.perf_counter() - started
        self._log.info(
            "compiled the %s in %.1f s",
            self.name,
            time.perf_counter() - started,
            once=(self.name, self.compilations),
        )
        return compiled


class Regions:
    """All compiled regions of one session; a region is compiled at its first call."""

    def __init__(self, context: Context[None]) -> None:
        self._log = context.log
        self._regions: dict[str, Region] = {}
        self._usable: dict[str, bool] = {}

    def of(self, name: str, function: Callable[..., Any], rows: int = 1) -> Region:
        """Return the region ``name``; its first ``rows`` arguments must come from :func:`rows_of`."""
        region = self._regions.get(name)
        if region is None:
            region = self._regions[name] = Region(name, function, rows, self._log)
        return region

    def all(self) -> tuple[Region, ...]:
        """Return the regions that have been called."""
        return tuple(self._regions.values())

    def usable(self, states: Tensor) -> bool:
        """Return whether functions can be compiled for the device of ``states``; always False under autocast.

        Logs a missing compiler once.
        """
        device = states.device.type
        if device not in self._usable:
            problem = missing_toolchain(device)
            self._usable[device] = problem is None
            if problem is not None:
                self._log.warning("%s; nothing is compiled meanwhile", problem)
        return self._usable[device] and not torch.is_autocast_enabled(device)

    def declined(self, region: str, reason: str) -> None:
        """Log once why a region runs eagerly."""
        self._log.info("the %s runs as it is: %s", region, reason, once=(region, reason))


def regions_of(context: Context[None]) -> Regions:
    """Return the regions of the context's session."""
    return context.state(Regions)


def rows_of(states: Tensor) -> Tensor:
    """Flatten ``[s, b, ...]`` to ``[s * b, ...]``.

    With grad mode off, the result is detached, so that one compiled graph serves all layers of a recomputed
    block.
    """
    rows = states.flatten(0, 1)
    if rows.requires_grad and not torch.is_grad_enabled():
        rows = rows.detach()
    return rows


def open_rows(rows: Tensor) -> Tensor:
    """Mark a tensor's first dimension as dynamic, so that other lengths do not recompile."""
    # torch.compile specializes size 1 in any case.
    if rows.size(0) > 1:
        torch._dynamo.mark_dynamic(rows, 0)
    return rows


# -- toolchain of torch.compile --------------------------------------------------------------------


def missing_toolchain(device_type: str) -> str | None:
    """Return which compiler for a device is missing and how to install it, or None."""
    if device_type == "cpu":
        named = os.environ.get("CXX", "g++")
        if shutil.which(named) is None:
            return f"there is no C++ compiler ({named}); install g++, or name one in CXX"
        return None
    if device_type == "npu":
        if find_spec("torch_npu") is None or find_spec("torch_npu._inductor") is None:
            return (
                "this torch_npu has no code generator for torch.compile; install one that has, and "
                "triton-ascend"
            )
        return None
    if find_spec("triton") is None:
        return "there is no Triton; pip install triton"
    named = os.environ.get("CC", "gcc")
    if shutil.which(named) is None:
        return (
            f"there is no C compiler ({named}), which Triton builds its launchers with; install gcc, or name "
            "one in CC"
        )
    return None


@cache
def inductor_settings(device_type: str) -> dict[str, Any]:
    """Return Inductor settings that skip its probing of vector instruction sets on x86.

    Inductor builds and loads a test program for each instruction set until one works, which takes longer than
    compiling a region. This function tests only the best instruction set that the processor reports. If the
    test passes, the settings make Inductor skip its own tests.
    """
    if device_type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return {}
    from torch._inductor import config, cpu_vec_isa

    flags = cpu_vec_isa.x86_isa_checker()
    supported = [
        each
        for each in cpu_vec_isa.supported_vec_isa_list
        if all(flag in flags for flag in str(each).split())
    ]
    if config.cpp.vec_isa_ok is not None or not supported or not supported[0]:
        return {}
    return {"cpp.vec_isa_ok": True}
