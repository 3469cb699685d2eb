"""Export of a job's checkpoints to Hugging Face files during and after training."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.agreement import decided, is_first, together
from mindspeed_dsa.features.checkpoints.hugging_face import companions, config, exporting, written_config
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import find
from mindspeed_dsa.features.checkpoints.hugging_face.exporting import Plan
from mindspeed_dsa.features.checkpoints.hugging_face.feature import Save
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape, listed
from mindspeed_dsa.features.checkpoints.hugging_face.torch_dist_files import INDEX
from mindspeed_dsa.log import Log
from mindspeed_dsa.runs.files import RunError, amount
from mindspeed_dsa.runs.whole_checkpoints import name_of, tracked

_WHO = "mindspeed_dsa save-hf"


def export_in_between(original: Callable[..., Any], context: Context[Save]) -> Callable[..., Any]:
    """Decorate ``save_checkpoint_and_time`` to export checkpoints at multiples of ``--save-hf-interval``."""

    def save_checkpoint_and_time(iteration: int, *args: Any, **kwargs: Any) -> Any:
        result = original(iteration, *args, **kwargs)
        every = context.options.interval
        if every and iteration % every == 0 and not kwargs.get("non_persistent_ckpt"):
            job = context.megatron("training").get_args()
            try:
                export(job, iteration, context.options, context.log)
            except RunError as error:
                # The checkpoint is whole, and training does not depend on the model.
                said = "%s; training goes on: `%s` writes this model"
                context.log.error(said, error, _command(job, iteration, context.options))
        return result

    return save_checkpoint_and_time


def _command(job: Any, iteration: int, options: Save) -> str:
    """Return the command that writes the model of a checkpoint."""
    name = name_of(iteration)
    words = ["python", "-m", "mindspeed_dsa", "weights", "export"]
    words += [f"{folder}/{name}" for folder in (job.save, options.folder)]
    words += [] if options.like is None else ["--like", str(options.like)]
    words += ["--fp8-blocks"] if options.fp8_blocks else []
    return shlex.join(words)


def export_at_the_end(original: Callable[..., Any], context: Context[Save]) -> Callable[..., Any]:
    """Decorate ``pretrain`` to export the last checkpoint."""

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
    """Export a checkpoint of the job; all ranks must call it, and share the work.

    Args:
        job: Megatron's arguments.
        iteration: iteration of the checkpoint below ``job.save``.
        options: options of the feature.
        log: logger for the result.

    Returns:
        Folder of the exported model; ``None`` if this checkpoint was exported already.

    Raises:
        RunError: on all ranks, if the export failed.
    """
    checkpoint, target = (folder / name_of(iteration) for folder in (Path(job.save), options.folder))
    exists = decided(target.exists, _WHO)
    # A folder for this checkpoint is kept. A folder for an earlier training of the same step is replaced.
    stale = exists and together(lambda: _is_stale(target, checkpoint, options), _WHO)
    if exists and not stale:
        log.info("%s is there already", target)
        return None
    if stale:
        log.info("%s is of another checkpoint of this step, and is replaced", target)
    plan = write_together(
        lambda: _plan(job, checkpoint, target, options, stale), lambda total: lambda done: None, _WHO
    )
    for note in plan.notes:
        log.info("%s: %s", target, note)
    log.info("%s: %s of weights", target, amount(plan.bytes))
    return target


def _origin(checkpoint: Path, options: Save) -> dict[str, Any]:
    """Return a dict with the job, checkpoint and format of an exported model, for `dsa_export.json`."""
    # torch gives each checkpoint a number of its own, which is in the index.
    digest = hashlib.sha256((checkpoint / INDEX).read_bytes()).hexdigest()
    return {"save": str(checkpoint.parent.resolve()), "checkpoint": digest, "fp8_blocks": options.fp8_blocks}


def _is_stale(target: Path, checkpoint: Path, options: Save) -> bool:
    """Return whether ``target`` was exported from another checkpoint of the same step and job.

    Raises:
        RunError: another job has written ``target``.
    """
    if refusal := exporting.refusal(target, checkpoint.parent):
        raise RunError(f"{_WHO}: {refusal}")
    return exporting.origin_of(target) != _origin(checkpoint, options)


def _plan(job: Any, checkpoint: Path, target: Path, options: Save, replaces: bool) -> Plan:
    """Return the plan for exporting a checkpoint of the job."""
    if options.like is not None:
        companions.require_own(options.like, _WHO)
    like = None if options.like is None else config.read_config(options.like, _WHO)
    vocabulary = None if like is None else like["vocab_size"]
    tokens = companions.token_ids(getattr(job, "tokenizer_model", None))
    described = written_config.config_of(
        job, options.release, _WHO, vocabulary=vocabulary, like=like, tokens=tokens
    )
    architecture = find(described, _WHO)
    return Plan(
        checkpoint=checkpoint,
        target=target,
        config=described,
        shape=Shape.of(job, architecture),
        vocabulary=described["vocab_size"],
        fp8_blocks=options.fp8_blocks,
        like=options.like,
        replaces=replaces,
        notes=written_config.notes(described, like, job, tokens),
        origin=_origin(checkpoint, options),
    )


def _require_one_checkpoint(plan: Plan, ranks: int, who: str) -> None:
    """Raise on all ranks if ranks see different checkpoints, for example a stale one of the same step."""
    digests: list[str] = [""] * ranks
    if ranks > 1:
        # torch gives each checkpoint a number of its own, which is in the index.
        digest = together(lambda: hashlib.sha256((plan.checkpoint / INDEX).read_bytes()).hexdigest(), who)
        dist.all_gather_object(digests, digest)
    if others := [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise RunError(
            f"{who}: ranks {listed(others)} see another checkpoint at {plan.checkpoint} than rank 0; wait "
            "until its file system shows the same to all machines, and run it again"
        )


def write_together(
    planned: Callable[[], Plan], progress: Callable[[int], Callable[[int], None]], who: str
) -> Plan:
    """Plan an export and write its files, shared by all ranks.

    Args:
        planned: function that returns the plan; called on every rank, as any rank may fail to see the files.
        progress: callback for :meth:`Plan.write`.
        who: prefix of error messages.

    Raises:
        RunError: on all ranks, if planning or writing failed on any.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plan = together(planned, who)
    _require_one_checkpoint(plan, ranks, who)
    try:
        together(lambda: plan.begin() if is_first() else None, who)
        together(lambda: plan.write(rank, ranks, progress), who)
        together(lambda: plan.publish() if is_first() else None, who)
    finally:
        plan.end()
    return plan
