"""Folders of a job: its run's folder, and the checkpoints that it may load and write."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dsa_job import checkpoints, folders
from dsa_job.errors import UsageError
from dsa_job.flags import FLAGS, FUSED_PARTS
from mindspeed_dsa.runs.files import RunError

# The library's switches select another implementation of the same arithmetic.
_FREE = {dest for dest, flag in FLAGS.items() if flag.free} | {
    "virtual_pipeline_model_parallel_size",
    *FUSED_PARTS,
    "dsa_backend",
    "dsa_fuse_kl_in_backward",
}


def open_run(args: argparse.Namespace) -> folders.Run:
    """Choose and lock the folder of this run, unless it would replace another job's checkpoints."""
    try:
        run = folders.open_run(
            Path(args.output_dir),
            settings(args),
            lambda folder: checkpoints.latest(save_folder(args, folder)),
            args.new_run,
        )
    except OSError as error:
        raise UsageError(f"--output-dir {args.output_dir} cannot be used: {error}") from error
    if not run.resumed:
        try:
            check_not_overwritten(args)
        except (UsageError, RunError):
            run.discard()
            raise
    return run


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON values that identify a job."""
    values = {name: value for name, value in sorted(vars(args).items()) if name not in _FREE}
    values |= {name: str(Path(values[name]).resolve()) for name in ("save", "load") if values.get(name)}
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return result


def save_folder(args: argparse.Namespace, folder: Path) -> Path:
    """Return the checkpoint folder of the run in a folder."""
    return Path(args.save) if args.save else folder / "checkpoints"


def saves_where_it_loads(args: argparse.Namespace) -> bool:
    """Return whether the job continues the checkpoints in ``--save``."""
    same = args.load and args.save and Path(args.load).resolve() == Path(args.save).resolve()
    return bool(same and not args.finetune)


def check_not_overwritten(args: argparse.Namespace) -> None:
    """Refuse to replace the checkpoints in ``--save`` by a job that does not continue from them."""
    existing = checkpoints.latest(Path(args.save)) if args.save and not args.no_save else None
    if existing is None:
        return
    continues = args.train_iters and saves_where_it_loads(args)
    if not continues or args.ckpt_step not in (None, existing):
        remedy = f", or continue from them with --load {args.save}" if args.train_iters else ""
        raise UsageError(
            f"--save {args.save} holds checkpoints up to step {existing}, which this job would replace; name "
            f"another folder{remedy}"
        )
