"""Translation rule for the number of layers, dense and MoE layers, and the split into pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from mindspeed_dsa.megatron.pipeline_chunks import FIRST, LAST, LAYOUT, layout_text
from mindspeed_dsa.tools.migrate.job import Given, Job

_NOOP, _LIST, _UNEVEN = "--noop-layers", "--num-layer-list", "--pipeline-num-transformer-layers"
_LAYERS, _PATTERN, _DENSE = "--num-layers", "--moe-layer-freq", "--first-k-dense-replace"
_STAGES, _PER_STAGE = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"
_MTP, _SCHEDULE = "--mtp-num-layers", "--schedules-method"
_NEEDS = {
    _DENSE: (_LAYERS, _DENSE, _PATTERN, _NOOP),
    _NOOP: (_LAYERS, _NOOP, _STAGES, _PER_STAGE, _MTP),
    _LIST: (_LAYERS, _LIST, _NOOP, _STAGES, _MTP),
    _UNEVEN: (_LAYERS, _UNEVEN, _STAGES, _MTP),
}
"""Dict from flag to the flags that must be readable to translate it."""
_READABLE = {
    _NOOP: r"[\d,]+",
    _LIST: r"[\d,]+",
    _UNEVEN: r"[\d,*\[\]\s]+",
    _DENSE: r"-?\d+",
    _PATTERN: r"-?[1-9]\d*",
}
"""Patterns of values that are not a plain number."""


def arrange(job: Job) -> None:
    """Translate flags for no-op layers, uneven stages, and leading dense layers."""
    noop = _numbers(job.text(_NOOP))
    total = job.number(_LAYERS)
    for flag in filter(job.__contains__, _NEEDS):
        unread = [
            flag_read
            for flag_read in _NEEDS[flag]
            if not re.fullmatch(
                _READABLE.get(flag_read, r"\d+"), job.text(flag_read, "" if flag_read == _LAYERS else "1")
            )
        ]
        if unread:
            why = f"{unread[0]} cannot be read: it may hang on a variable that is not set."
            job.is_dropped(flag, why, results=True)
    if total is None or any(flag in job.outcomes for flag in _NEEDS):
        return
    if _DENSE in job:
        _dense_first(job, total, noop)
    if _NOOP in job:
        _without_noop(job, total, noop)
        if _LIST in job:
            job.is_dropped(_LIST, "MindSpeed-LLM does not read it with --noop-layers.")
    elif _LIST in job:
        _lay_out(job, _LIST, [[count] for count in _numbers(job.text(_LIST))], "Layers of each stage.")
    if _UNEVEN in job:
        _lay_out(job, _UNEVEN, _nested(job.text(_UNEVEN)), "Layers of each stage and virtual stage.")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", text)]


def _nested(text: str) -> list[list[int]]:
    """Parse layer counts per stage and virtual stage, such as ``[[2,3],[3,2]]`` or ``[[1]*2]*4``."""
    stages: list[list[int]] = []
    for inner, times in re.findall(r"\[([\d,\s*]+)\](?:\s*\*\s*(\d+))?", text):
        counts: list[int] = []
        for number, repeat in re.findall(r"(\d+)(?:\s*\*\s*(\d+))?", inner):
            counts += [int(number)] * int(repeat or 1)
        stages += [counts] * int(times or 1)
    return stages


def _dense_first(job: Job, total: int, noop: Sequence[int]) -> None:
    """Set ``--moe-layer-freq`` to a pattern of dense and MoE layers, without MindSpeed-LLM's no-op layers."""
    dense, step = int(job.text(_DENSE)), int(job.text(_PATTERN, "1"))
    # 61 layers with 3 dense ones: ([0]*3+[1]*58).
    pattern = [int(layer >= dense and layer % step == 0) for layer in range(total) if layer not in noop]
    text = "+".join(f"[{value}]*{len(list(run))}" for value, run in groupby(pattern))
    job.overrides(_DENSE, Given(_PATTERN, (f"({text})",), (f"({text})",)), "1 for layers with experts.")


def _without_noop(job: Job, total: int, noop: Sequence[int]) -> None:
    """Remove no-op layers: reduce the number of layers, and use uneven stages."""
    stages, per = job.number(_STAGES, 1) or 1, job.number(_PER_STAGE)
    in_v = job.text(_SCHEDULE) == "dualpipev"  # also in MindSpeed both chunks of a stage are equal
    # Layers per chunk, counted with no-op layers: 64 layers on 8 stages are chunks of 8, or of 4 in a V.
    size = per or max(1, total // (2 * stages if in_v else stages))
    chunks = [sum(layer not in noop for layer in range(at, at + size)) for at in range(0, total, size)]
    left = total - len(set(noop))
    job.overrides(_NOOP, _one(_LAYERS, left))
    # Chunk c is on stage c % stages. In a V the second chunks are on the stages in reverse order, but a
    # layout lists them in the model's order.
    if len(set(chunks)) == 1:  # every stage has the same number of no-op layers
        if per and per != chunks[0]:
            job.overrides(_NOOP, _one(_PER_STAGE, chunks[0]))
    else:
        _lay_out(
            job,
            _NOOP,
            [chunks[stage::stages] for stage in range(stages)],
            "Layers that do nothing are left out.",
        )


def _one(flag: str, number: int) -> Given:
    return Given(flag, (str(number),), (str(number),))


def _lay_out(job: Job, flag: str, stages: list[list[int]], why: str) -> None:
    """Set the flags for layers of the first and last stage if they suffice, else a pipeline layout.

    Args:
        job: translation to add the flags to.
        flag: original flag that the new ones replace.
        stages: number of layers of each virtual stage, per stage.
        why: sentence for the report.
    """
    if LAYOUT in job:
        job.problems.append(
            f"{job.given[flag]} lays out the pipeline, and so does {job.given[LAYOUT]}: keep one"
        )
        return
    virtual = max(map(len, stages), default=0)
    if not virtual or any(len(chunks) != virtual for chunks in stages):
        job.is_dropped(flag, "These are not the layers of stages.", results=True)
        return
    first, last, middle = stages[0][0], stages[-1][0], {chunks[0] for chunks in stages[1:-1]}
    if virtual == 1 and len(stages) > 1 and len(middle) <= 1 and (middle or first == last):
        usual = next(iter(middle), first)
        if first != usual:
            job.overrides(flag, _one(FIRST, first), why)
        if last != usual:
            job.overrides(flag, _one(LAST, last), why)
        if flag not in job.outcomes:
            job.is_dropped(flag, "All stages have as many layers.")
        return
    if job.before("0.14"):
        text = "Only Megatron-core 0.14 and later lay out such stages."
        job.is_dropped(flag, text, results=True)
        return
    # A layout lists chunks in forward order: first chunks of all stages, then second chunks.
    order = [stages[stage][turn] for turn in range(virtual) for stage in range(len(stages))]
    text = layout_text(order, job.number(_MTP) or 0)
    job.overrides(flag, Given(LAYOUT, (text,), (text,)), why)
    job.omits(_PER_STAGE, f"{LAYOUT} says it.")
