"""Entry point of the job: from the command line to an exit code."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspeed_dsa
from dsa_job import checkpoints, runs
from dsa_job.arguments import parse_args
from dsa_job.errors import Interrupted, JobError, UsageError
from dsa_job.folders import Run
from dsa_job.text import FEWEST_DOCUMENTS, check_size, find_text
from dsa_job.tokenizers import build_tokenizer
from dsa_job.validation import World, check, padded_vocab_size
from mindspeed_dsa import session
from mindspeed_dsa.patches.errors import say_once

_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_ROOM = "checkpoints are as they were: when files can be written, the same command goes on from the newest"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return 0: done, 1: failure, 2: refused, 3: loss not finite, 130: Ctrl-C."""
    world = World()
    # Hide missing optional packages of Megatron and deprecations in its calls of torch: users cannot act on
    # them.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|megatron)\.")
    warnings.filterwarnings(
        "ignore", message=".*(not installed|full scope is deprecated)", module=r"megatron\."
    )
    try:
        world = World.from_environment()
        args = parse_args(argv)
        check(args, world)
        enable_features(args)
        run = prepare(args, world)
        from dsa_job.training import train

        train(args, run=run, quiet=world.rank != 0)
    except (JobError, mindspeed_dsa.MindSpeedDSAError) as error:
        problems = error.problems if isinstance(error, UsageError) else [str(error)]
        say_once("\n".join(f"pretrain_dsa.py: {text}" for text in problems))
        return error.exit_code if isinstance(error, JobError) else UsageError.exit_code
    except KeyboardInterrupt:
        print("pretrain_dsa.py: stopped at once by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(Interrupted.exit_code)
    except Exception as error:
        trace = error.__traceback__
        if isinstance(error, OSError) and error.errno in _STORAGE:  # wherever it was raised
            error, trace = OSError(f"{error}; {_ROOM}"), None
        elif world.size == 1:
            raise
        # torch's hook prints this rank; --record-collectives' hook leaves a record.
        sys.excepthook(type(error), error, trace)
        sys.stderr.flush()
        # Exit at once to close this rank's connections: the other ranks then notice the failure, wherever
        # they wait.
        os._exit(1)
    return 0


def told(args: argparse.Namespace) -> dict[str, Any]:
    """Return Megatron flags that features depend on: the model's kind, and how ranks divide sequences."""
    names = ("context_parallel_size", "tensor_model_parallel_size", "sequence_parallel")
    return {
        "experimental_attention_variant": args.experimental_attention_variant or "none",
        "multi_latent_attention": True,
        "transformer_impl": args.transformer_impl,
        "seq_length": args.seq_length,
        **{name: getattr(args, name) for name in names},
    }


def enable_features(args: argparse.Namespace) -> None:
    """Enable the requested features; fused DSA is on unless arguments or environment disable it."""
    mindspeed_dsa.enable(**told(args))
    running = session.current()
    assert running is not None
    if args.use_fused_dsa and running.settings.setting("use_fused_dsa").source == "default":
        mindspeed_dsa.enable(use_fused_dsa=True)
    else:
        args.use_fused_dsa = running.settings.use_fused_dsa
    # Features may check --save before the run's folder is chosen; the output folder stands in for it.
    named = args.save
    args.save = named or (None if args.no_save else args.output_dir)
    mindspeed_dsa.validate(args)
    args.save = named


def prepare(args: argparse.Namespace, world: World) -> Run | None:
    """Check all files before a process group exists, and choose the run's folder on rank 0."""
    from dsa_job.model import check_config  # torch and Megatron, after all that needs neither

    check_config(args)
    args.padded_vocab_size = padded_vocab_size(args, build_tokenizer(args.tokenizer_model).vocab_size)
    if args.train_iters:
        source = find_text(args.data)
        # A tokenizer makes at most one token per byte, plus one for the end of each document.
        most = source.size + max(len(source.files), FEWEST_DOCUMENTS)
        check_size(args.split, args.seq_length, most, counted=False)
    if args.load:
        from dsa_job import checkpoint

        checkpoint.check_fits(args, checkpoints.find(Path(args.load), args.ckpt_step)[0])
    if world.rank:
        return None
    if not args.train_iters:
        runs.check_not_overwritten(args)
        return None
    run = runs.open_run(args)
    print(run.why, flush=True)
    return run
