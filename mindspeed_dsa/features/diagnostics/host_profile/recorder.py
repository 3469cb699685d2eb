"""One step under torch's profiler, with a range for each module's forward, and the next one by function."""

from __future__ import annotations

import cProfile
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as torch_modules

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.diagnostics.host_profile import account
from mindspeed_dsa.features.diagnostics.host_profile.feature import Options
from mindspeed_dsa.megatron import pipeline_steps
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.compose import is_patch
from mindspeed_dsa.runs import files

_PACKAGE = str(Path(__file__).parents[3])
_PLATFORM = "features/platform/"
_SHOWN = 12


class Recorder(pipeline_steps.Follower):
    """Counts a session's training steps; records the chosen one and the one after it."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context.megatron)
        self._options, self._steps = context.options, 0
        self._root = context.megatron.root
        self._profile: Any = None
        self._functions: cProfile.Profile | None = None
        self._hooks: list[Any] = []
        self._ranges: list[Any] = []
        self._started = 0.0
        self._record: dict[str, Any] = {}

    def begins(self, step: dict[str, Any]) -> bool:
        """Start the profiler that this step is for."""
        self._steps += 1
        number = self._steps - self._options.step
        if number not in (0, 1) or (dist.is_initialized() and dist.get_rank() != 0):
            return False
        platforms.current().synchronize()
        if number == 0:
            self._hooks = [
                torch_modules.register_module_forward_pre_hook(self._enter),
                torch_modules.register_module_forward_hook(self._leave, always_call=True),
            ]
            self._profile = torch.autograd.profiler.profile()
            self._profile.__enter__()
        else:
            self._functions = cProfile.Profile()
            self._functions.enable()
        self._started = time.perf_counter()
        return True

    def ends(self, step: dict[str, Any]) -> None:
        """Stop it; after the second one write the file."""
        seconds = time.perf_counter() - self._started
        if self._functions is not None:
            self._functions.disable()
            self._record["library"] = own_share(self._functions)
            files.write_atomically(self._options.file, json.dumps(self._record, indent=1) + "\n")
            return
        self._profile.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._record = {
            "step": self._steps,
            "seconds": seconds,
            "features_on": self._options.features_on,
            "megatron_core": versions.of_megatron(self._root),
            **account.of_events(self._profile.function_events),
        }

    def _enter(self, module: Any, inputs: Any) -> None:
        span = torch.autograd.profiler.record_function(account.PREFIX + type(module).__name__)
        span.__enter__()
        self._ranges.append(span)

    def _leave(self, module: Any, inputs: Any, output: Any) -> None:
        self._ranges.pop().__exit__(None, None, None)


def own_share(functions: cProfile.Profile) -> dict[str, Any]:
    """Time in this library's own lines of Python, without what they call, of all functions' time.

    Returns:
        ``share`` of all lines; ``patches``, that of the functions which stand in Megatron's places, without
        what these call to do Megatron's work in another way; ``platform``, that of the functions which stand
        for a device that is not there; ``functions``, the most costly.
    """
    total, patches, platform, own = 0.0, 0.0, 0.0, []
    for entry in functions.getstats():
        total += entry.inlinetime
        code = entry.code
        if not isinstance(code, str) and code.co_filename.startswith(_PACKAGE):
            place = Path(code.co_filename).relative_to(_PACKAGE).as_posix()
            own.append((1e6 * entry.inlinetime, entry.callcount, f"{place}:{code.co_name}"))
            if place.startswith(_PLATFORM):
                platform += entry.inlinetime
            elif is_patch(code):
                patches += entry.inlinetime
    own.sort(reverse=True)
    names = ("microseconds", "calls", "function")
    return {
        "share": sum(each[0] for each in own) / (1e6 * total) if total else 0.0,
        "patches": patches / total if total else 0.0,
        "platform": platform / total if total else 0.0,
        "functions": [dict(zip(names, each, strict=True)) for each in own[:_SHOWN]],
    }


def record_steps(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_forward_backward_func``."""
    return pipeline_steps.follow_steps(original, context.state(Recorder))
