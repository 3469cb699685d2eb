"""Models in Hugging Face's files, written of a job's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.agreement import together
from mindspeed_dsa.features.checkpoints.hugging_face import config, written_config
from mindspeed_dsa.features.checkpoints.hugging_face.exporting import Export, Wish
from mindspeed_dsa.features.checkpoints.hugging_face.feature import Save
from mindspeed_dsa.features.checkpoints.hugging_face.loading import TRACKER
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape
from mindspeed_dsa.log import Log
from mindspeed_dsa.runs.files import amount, number

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
        tracker = Path(job.save) / TRACKER
        iteration = number(tracker.read_text(encoding="ascii").strip()) if tracker.is_file() else None
        if iteration is None:
            context.log.warning("--save-hf: %s has no checkpoint, so no model is written", job.save)
        else:
            export(job, iteration, context.options, context.log)
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
        The model's folder; None where it is there already.

    Raises:
        RunError: on all ranks.
    """
    name = f"iter_{iteration:07d}"
    target = options.folder / name
    there = [target.exists()]
    dist.broadcast_object_list(there)
    if there[0]:
        log.info("%s is there already", target)
        return None
    plan = write_together(
        lambda: _wish(job, Path(job.save) / name, target, options), lambda total: lambda done: None, _WHO
    )
    log.info("%s: %s of weights", target, amount(plan.bytes))
    return target


def _wish(job: Any, checkpoint: Path, target: Path, options: Save) -> Wish:
    """Return the export of a job's checkpoint."""
    like = None if options.like is None else config.read_config(options.like, _WHO)
    vocabulary = None if like is None else like["vocab_size"]
    described = written_config.config_of(job, options.release, _WHO, vocabulary=vocabulary, like=like)
    return Wish(
        checkpoint=checkpoint,
        target=target,
        config=described,
        shape=Shape.of(job),
        vocabulary=described["vocab_size"],
        fp8_blocks=options.fp8_blocks,
        like=options.like,
    )


def write_together(
    wish: Callable[[], Wish], progress: Callable[[int], Callable[[int], None]], who: str
) -> Export:
    """Plan an export and write its files on all ranks, or in this process alone.

    Args:
        wish: says what is to be exported; called on every rank, of which one may not see the files.
        progress: as of :meth:`Export.write`.
        who: speaks if it fails.

    Raises:
        RunError: on all ranks.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plan = together(lambda: Export(wish()), who)
    together(lambda: plan.begin() if rank == 0 else None, who)
    together(lambda: plan.write(rank, ranks, progress), who)
    together(lambda: plan.publish() if rank == 0 else None, who)
    return plan
