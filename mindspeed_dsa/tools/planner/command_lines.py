"""Command lines of planned jobs: flags for layout and memory-saving features, ready to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from mindspeed_dsa.megatron.batches import GLOBAL
from mindspeed_dsa.tools.planner import flags, layouts
from mindspeed_dsa.tools.planner.job import Features, Job, Layout, Training

_WIDTH = 108
_LAYOUT = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "microbatch_group_size_per_vp_stage",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_tp_extend_ep",
    "sequence_parallel",
    "micro_batch_size",
}
"""Arguments that a search sets."""
_SPLIT = {*flags.SPLIT, "pipeline_model_parallel_layout"}
"""Arguments that deal layers to pipeline stages."""
_MEGATRONS_RECOMPUTATION = {
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
}
_PARTIAL = {
    "recompute_norm",
    "recompute_norm_num_layers",
    "recompute_activation_function",
    "recompute_activation_function_num_layers",
}
_SWAPPED = {
    "swap_attention",
    "swap_attention_num_layers",
    "swap_attention_bytes",
    "swap_attention_min_bytes",
    "swap_modules",
}
_OTHER_OPTIMIZERS = {"reuse_fp32_param", "virtual_optimizer"}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def words_for(command: Sequence[str], job: Job) -> list[str]:
    """Return the command line of a job found by a search.

    Args:
        command: command line of the original job, script first if there is one; its layout flags are dropped.
        job: job that the search found, with the same model as the original job.

    Returns:
        Command line words: the remaining words of ``command``, then flags for layout, micro-batch and
            memory-saving features.
    """
    read, named, _ = flags.read(command)
    dropped, added = _LAYOUT | _SPLIT, of_layout(job.layout, job) + of_micro(job.training)
    features, training = job.features, job.training
    # The search chose full recomputation, which replaces all partial measures.
    if training.full < 0 and read.recompute_granularity != "full":
        dropped |= _MEGATRONS_RECOMPUTATION | _PARTIAL | _SWAPPED
        added += FULL.split()
    else:
        added += _of_measures(features, read)
    if features.swap_optimizer and not read.swap_optimizer:
        dropped |= _OTHER_OPTIMIZERS
        added.append("--swap-optimizer")
    # Write the batch size that the plan assumed.
    if not (read.example or {"global_batch_size", "step_batch_size_schedule"} & named):
        added += [GLOBAL, str(training.batch)]
    return [*_without(command, dropped), *added]


def with_split(command: Sequence[str], job: Job) -> list[str]:
    """Return the command line of a job whose layers are dealt to stages in another way than the original's.

    Args:
        command: command line of the original job, script first if there is one.
        job: job with the new split, and else with the original job's layout.
    """
    return [*_without(command, _SPLIT), *of_split(job.layout, job)]


def _without(command: Sequence[str], dropped: set[str]) -> list[str]:
    """Return the words of a command without the flags of some arguments."""
    options = flags.parser()._option_string_actions
    kept: list[str] = []
    for group in groups(command):
        action = options.get(group[0].partition("=")[0])
        if action is None or action.dest not in dropped:
            kept += group
    return kept


def _of_measures(features: Features, read: object) -> list[str]:
    """Return the flags of memory-saving features that the search added to the original job."""
    pairs = (
        ("recompute_norm", features.recompute_norm),
        ("recompute_activation_function", features.recompute_act),
        ("swap_attention", features.swap_attention),
    )
    return [f"--{name.replace('_', '-')}" for name, on in pairs if on and not getattr(read, name)]


def of_layout(layout: Layout, job: Job) -> list[str]:
    """Return the flags of a layout, except flags whose value is Megatron's default."""
    words: list[str] = []
    sizes = (
        ("tensor-model-parallel-size", layout.tp),
        ("pipeline-model-parallel-size", layout.pp),
        ("context-parallel-size", layout.cp),
        ("expert-model-parallel-size", layout.ep),
    )
    for name, size in sizes:
        words += [f"--{name}", str(size)] if size > 1 else []
    if job.model.experts and layout.etp != layout.tp:
        words += ["--expert-tensor-parallel-size", str(layout.etp)]
    if layout.sequence:
        words.append("--sequence-parallel")
    return [*words, *of_split(layout, job)]


def of_split(layout: Layout, job: Job) -> list[str]:
    """Return the flags that deal layers to pipeline stages, except for Megatron's even split."""
    words = shlex.split(layouts.split_of(layout, job.model).flags())
    if layout.vpp > 1 and not layout.v_shaped and not layout.stages:
        return ["--num-virtual-stages-per-pipeline-rank", str(layout.vpp), *words]
    return words


def of_micro(training: Training) -> list[str]:
    """Return the flag for the micro-batch size."""
    return ["--micro-batch-size", str(training.micro)]


def groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values; words before the first flag form their own group."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def shown(words: Sequence[str], indent: str = "    ", width: int = _WIDTH) -> list[str]:
    """Return a shell command as lines joined by backslashes; a flag and its values stay on one line."""
    lines = [indent.rstrip("\n")]
    for group in groups(words):
        text = shlex.join(group)
        if len(lines[-1]) + len(text) + 3 > width and lines[-1].strip():
            lines[-1] = f"{lines[-1].rstrip()} \\"
            lines.append(indent + "    ")
        lines[-1] += f"{text} "
    return [line.rstrip() for line in lines]
