"""Hugging Face weights: read before the optimizer is built, and written from checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mindspeed_dsa import log, session
from mindspeed_dsa.features.checkpoints.hugging_face.feature import Save


def read(args: argparse.Namespace, model: list[Any]) -> None:
    """Fill a newly built model with the weights of ``--load-hf``, unless a checkpoint follows."""
    if args.load_hf and not args.load:
        from mindspeed_dsa.features.checkpoints.hugging_face import loading  # needs safetensors

        loading.load(model, Path(args.load_hf), args, log.get())


def write(args: argparse.Namespace, step: int) -> None:
    """Write the checkpoint of a step below ``--save-hf``; all ranks call it together."""
    running = session.current()
    assert running is not None
    if args.save_hf:
        from mindspeed_dsa.features.checkpoints.hugging_face import saving

        saving.export(args, step, Save.of(running.settings), log.get())
