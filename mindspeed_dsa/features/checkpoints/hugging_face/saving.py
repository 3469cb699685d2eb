"""Models in Hugging Face's files, written of a job's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.agreement import decided, is_first, together
from mindspeed_dsa.features.checkpoints.hugging_face import companions, config, written_config
from mindspeed_dsa.features.checkpoints.hugging_face.exporting import Plan
from mindspeed_dsa.features.checkpoints.hugging_face.feature import Save
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape
from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import INDEX
from mindspeed_dsa.log import Log
from mindspeed_dsa.runs.files import amount
from mindspeed_dsa.runs.whole_checkpoints import name_of, tracked

_WHO = "mindspeed_dsa save-hf"


def export_in_between(original: Callable[..., Any], context: Context[Save]) -> Callable[..., Any]:
    """Decorate ``save_checkpoint_and_time`` of Megatron's training loop."""

    def save_checkpoint_and_time(iteration: int, *args: Any, **kwargs: Any) -> Any:
        result = original(iteration, *args, **kwargs)
        every = context.options.interval
        if every and iteration % every == 0 and not kwargs.get("non_persistent_ckpt"):
            export(context.megatron("training").get_args(), iteration, context.options, context.log)
        return result

    return save_checkpoint_and_time


def export_at_the_end(original: Callable[..., Any], context: Context[Save]) -> Callable[..., Any]:
    """Decorate ``pretrain`` of Megatron's training loop."""

    def pretrain(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        job = context.megatron("training").get_args()
        iteration, _ = decided(lambda: tracked(Path(job.save)), _WHO)
        if isinstance(iteration, int):
            export(job, iteration, context.options, context.log)
        else:
            context.log.warning("--save-hf: %s has no checkpoint, so no model is written", job.save)
        return result

    return pretrain


def export(job: Any, iteration: int, options: Save, log: Log) -> Path | None:
    """Write a model of a job's checkpoint; all ranks call it together, and share the work.

    Args:
        job: Megatron's arguments.
        iteration: of the checkpoint below ``job.save``.
        options: of the feature.
        log: says what is written.

    Returns:
        The model's folder; None where it is there already, of this very checkpoint.

    Raises:
        RunError: on all ranks.
    """
    checkpoint, target = (folder / name_of(iteration) for folder in (Path(job.save), options.folder))
    stale = decided(lambda: target.exists() and not _is_of(target, checkpoint), _WHO)
    if not stale and decided(target.exists, _WHO):
        log.info("%s is there already", target)
        return None
    if stale:
        log.info("%s is of another checkpoint of this step, and is replaced", target)
    plan = write_together(
        lambda: _plan(job, checkpoint, target, options, stale), lambda total: lambda done: None, _WHO
    )
    log.info("%s: %s of weights", target, amount(plan.bytes))
    return target


def _is_of(target: Path, checkpoint: Path) -> bool:
    """Return whether a folder is the model of a checkpoint, or no model, which is nothing to replace.

    A step that is trained anew after a rollback has a checkpoint that is younger than its model.
    """
    described = target / config.FILE
    return not described.is_file() or described.stat().st_mtime_ns >= (checkpoint / INDEX).stat().st_mtime_ns


def _plan(job: Any, checkpoint: Path, target: Path, options: Save, replaces: bool) -> Plan:
    """Return the export of a job's checkpoint."""
    if options.like is not None:
        companions.require_own(options.like, _WHO)
    like = None if options.like is None else config.read_config(options.like, _WHO)
    vocabulary = None if like is None else like["vocab_size"]
    described = written_config.config_of(job, options.release, _WHO, vocabulary=vocabulary, like=like)
    return Plan(
        checkpoint=checkpoint,
        target=target,
        config=described,
        shape=Shape.of(job),
        vocabulary=described["vocab_size"],
        fp8_blocks=options.fp8_blocks,
        like=options.like,
        replaces=replaces,
    )


def write_together(
    planned: Callable[[], Plan], progress: Callable[[int], Callable[[int], None]], who: str
) -> Plan:
    """Plan an export and write its files on all ranks, or in this process alone.

    Args:
        planned: function that returns the plan; called on every rank, of which one may not see the files.
        progress: callback, as of :meth:`Plan.write`.
        who: name that messages begin with.

    Raises:
        RunError: on all ranks.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plan = together(planned, who)
    try:
        together(lambda: plan.begin() if is_first() else None, who)
        together(lambda: plan.write(rank, ranks, progress), who)
        together(lambda: plan.publish() if is_first() else None, who)
    finally:
        plan.end()
    return plan
