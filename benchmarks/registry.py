"""List of all benchmark cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Union

from benchmarks.installed import refusal_of_npu

Metrics = Mapping[str, Union[float, int, str, "Metrics"]]
"""Plain numbers, a sentence in place of a missing number, or nested tables of these."""


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        name: name on the command line.
        summary: one line.
        module: module with ``run(device) -> Metrics``; imported when the case is run.
        on_device: whether it computes on a device, so that ``--device auto`` searches for one.
        has_quick: whether ``run`` takes ``quick``, for a run in seconds with meaningless figures.
        options: additional keywords of ``run``, each with its help on the command line.
        optional: names of options whose value may be left out, and is then an empty string.
        refusal: function that returns why the case cannot run in this environment, or None; called before the
            module is imported.
    """

    name: str
    summary: str
    module: str
    on_device: bool = True
    has_quick: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    refusal: Callable[[], str | None] = lambda: None

    def run(self, device: str, quick: bool = False, **options: str) -> Metrics:
        """Run the case and return its metrics."""
        function: Callable[..., Metrics] = import_module(self.module).run
        return function(device, **({"quick": True} if quick else {}), **options)


_CELLS = {
    "link": "rate of the link, as tc reads it (default: 2gbit)",
    "only": "names of cells with commas between",
}
_TRACE = {"trace": "file for a chrome trace of one step; an image is written next to it"}

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "patch-engine",
            "overhead of patching: per call, at arming, checking and verification, and with all features off",
            "benchmarks.patch_engine",
            on_device=False,
        ),
        Case(
            "checkpoints",
            "saves of a state on the host, and of the example job with each optimizer feature: time that an "
            "asynchronous one takes from training over that of a synchronous one, and what the manifest adds",
            "benchmarks.checkpoints",
            on_device=False,
            has_quick=True,
            options={"size": "GB of the state (default: 1)"},
        ),
        Case(
            "dsa",
            "sparse attention operators: speed and memory compared with Megatron's own, time over the floor",
            "benchmarks.dsa",
            has_quick=True,
            options={
                "model": "whose widths: deepseek-v3.2 (default), glm-5 or glm-5.2",
                "only": "names of parts with commas between",
            },
        ),
        Case(
            "gpu",
            "all that needs an NVIDIA GPU in one go: tests, operators, training steps, a trace, a report",
            "benchmarks.gpu",
            has_quick=True,
            options={
                "report": "folder for report.md, the trace and logs (default: runs/gpu)",
                "only": "names of parts with commas between",
            },
        ),
        Case(
            "npu",
            "the first hour on an Ascend NPU: operators, a layer, features beside references; a report",
            "benchmarks.npu",
            has_quick=True,
            options={
                "report": "folder for report.md and logs (default: runs/npu)",
                "only": "names of parts with commas between",
            },
            refusal=refusal_of_npu,
        ),
        Case(
            "kernels-static",
            "Triton kernels compiled ahead of time for four targets: resources, traffic, and a model's bound",
            "benchmarks.kernels",
            on_device=False,
            has_quick=True,
        ),
        Case(
            "tp-overlap",
            "tensor parallel communication overlapped with matmul, two ranks with a slow link (needs root)",
            "benchmarks.tp_overlap",
            on_device=False,
            has_quick=True,
            options={
                "link": "rate of the link, as tc reads it (default: 2gbit)",
                "trace": "file for a chrome trace of one step; an image is written next to it",
            },
        ),
        Case(
            "moe",
            "mixture of experts: overlapped all-to-alls, two ranks with a slow link (needs root)",
            "benchmarks.moe",
            on_device=False,
            has_quick=True,
            options={**_CELLS, **_TRACE},
        ),
        Case(
            "pipeline",
            "pipeline schedules: simulated; pairs over a slow link (needs root); recompute in real bubbles",
            "benchmarks.pipeline",
            on_device=False,
            has_quick=True,
            options=_CELLS,
        ),
        Case(
            "context-parallel",
            "context parallelism: shares of work, bytes against formulas, hidden transfers, memory and time",
            "benchmarks.context_parallel",
            on_device=False,
            has_quick=True,
            options={**_CELLS, **_TRACE},
        ),
        Case(
            "fsdp2",
            "FSDP2: bytes at rest and on a slow link (needs root), hidden gathers, a step beside DDP's",
            "benchmarks.fsdp2",
            on_device=False,
            has_quick=True,
            options={"link": "rate of the link, as tc reads it (default: 2gbit)"},
        ),
        Case(
            "plan",
            "plans: against counted bytes of 19 layouts on four ranks, their speed, the articles' figures",
            "benchmarks.plan",
            on_device=False,
            has_quick=True,
            options={
                "only": "part of the names of the layouts that are counted",
                "published": "only plan published runs, and write their tables into docs/design/planner.md; "
                "with a file of other records, print the tables",
            },
            optional=("published",),
        ),
        Case(
            "memory",
            "memory features: device bytes per parameter, bytes of activations, step time",
            "benchmarks.memory",
            has_quick=True,
            options={"timed": "only the time of a step, with these features (names with commas between)"},
        ),
        Case(
            "linear-cross-entropy",
            "output projection and loss in chunks of tokens: bytes and time beside Megatron's whole logits",
            "benchmarks.linear_cross_entropy",
            has_quick=True,
        ),
        Case(
            "weights",
            "weights of Hugging Face's files imported and exported, beside a plain copy of the files",
            "benchmarks.weights",
            on_device=False,
            has_quick=True,
            options={"size": "GB of the model in bf16 (default: 4)"},
        ),
        Case(
            "selections",
            "selections of keys: in FP8, bytes and time of a recording, and models whose layers share them",
            "benchmarks.selections",
            has_quick=True,
            options={"only": "names of parts with commas between"},
        ),
        Case(
            "transformers",
            "Hugging Face's models: time and memory with eager and sdpa attention, and on operators",
            "benchmarks.transformers_models",
            on_device=False,
            has_quick=True,
            options={"only": "model types with commas between"},
        ),
        Case(
            "small-operators",
            "operators and host time of a layer: fused and compiled, beside stock Megatron",
            "benchmarks.small_operators",
            on_device=False,
            has_quick=True,
        ),
    )
}
