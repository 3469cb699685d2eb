"""Variables of the environment that decide speed and memory on NPUs: what each does and which value to use.

From the manuals of torch_npu, CANN and HCCL, and from MindSpeed-LLM's script that trains DeepSeek-V3.2.
Importing this loads no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

UNSET = "not set"
_MANUAL, _SCRIPT = "manual", "MindSpeed-LLM"


@dataclass(frozen=True)
class Variable:
    """One variable.

    Attributes:
        name: of the environment.
        does: a clause that begins with a verb.
        recommended: a value, or :data:`UNSET`.
        why: of the recommendation.
        sources: where it is from.
        accepts: whether another value is as good, or better.
    """

    name: str
    does: str
    recommended: str
    why: str
    sources: tuple[str, ...]
    accepts: Callable[[str], bool] = lambda value: False

    def said_of(self, value: str | None) -> str:
        """The value, and what is recommended in its place if anything is.

        Args:
            value: None where it is not set.
        """
        shown = UNSET if value is None else value
        if shown == self.recommended or (value is not None and self.accepts(value)):
            return shown
        wanted = "leave it out" if self.recommended == UNSET else f"{self.recommended} is recommended"
        return f"{shown}; {wanted}: {self.why}"


def _at_least(seconds: int) -> Callable[[str], bool]:
    return lambda value: value.isdigit() and int(value) >= seconds


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
)


def environment() -> dict[str, str]:
    """Return what is set in this process, by name, with what is recommended in its place."""
    return {each.name: each.said_of(os.environ.get(each.name)) for each in VARIABLES}
