"""Loading of the newest complete checkpoint in a folder, instead of the one that the tracker names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.checkpoints.whole.feature import Options
from mindspeed_dsa.features.checkpoints.whole.work import Work
from mindspeed_dsa.patches.errors import MindSpeedDSAError, show_without_traceback
from mindspeed_dsa.runs import whole_checkpoints
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.whole_checkpoints import Choice


def load_whole(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``_load_base_checkpoint`` to load the newest complete checkpoint."""

    # Megatron calls it twice: for a checkpoint's arguments, and to load it.
    def _load_base_checkpoint(load_dir: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        if load_dir is None:
            return original(load_dir, args, *rest, **kwargs)
        place = (Path(load_dir), getattr(args, "ckpt_step", None) or None)
        choice, choices = _chosen(*place, context), context.state(Work).choices
        is_kept = place in choices
        choices[place] = choice  # for `read_metadata`, which Megatron calls in here
        try:
            with _step(args, choice):
                return original(load_dir, args, *rest, **kwargs)
        finally:
            if not is_kept:
                choices.pop(place, None)

    return _load_base_checkpoint


@contextlib.contextmanager
def _step(args: Any, choice: Choice) -> Iterator[None]:
    """Set ``--ckpt-step`` to the chosen iteration inside the block, so that Megatron needs no tracker."""
    if choice.state is None or choice.state.iteration is None:
        yield
        return
    before = getattr(args, "ckpt_step", None)
    args.ckpt_step = choice.state.iteration
    try:
        yield
    finally:
        args.ckpt_step = before


def read_chosen(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``read_metadata`` to return the chosen checkpoint's iteration, not the tracker's."""
    work = context.state(Work)

    def read_metadata(tracker_filename: Any) -> tuple[int, bool]:
        tracker = Path(tracker_filename)
        if tracker.name != whole_checkpoints.TRACKER:
            result: tuple[int, bool] = original(tracker_filename)
            return result
        # The last choice for this folder, whatever its `--ckpt-step` was.
        made = [choice for (folder, _), choice in work.choices.items() if folder == tracker.parent]
        choice = made[-1] if made else _chosen(tracker.parent, None, context)
        if choice.state is None:
            return -1, False  # no checkpoint
        return choice.state.iteration or 0, choice.state.iteration is None

    return read_metadata


def pass_over_non_persistent(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``_get_non_persistent_iteration`` to return -1 if no non-persistent checkpoint is complete."""

    def _get_non_persistent_iteration(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RunError as error:
            context.log.warning("non-persistent checkpoints are passed over: %s", error)
            return -1

    return _get_non_persistent_iteration


def forget_choices(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``load_checkpoint`` to clear the cache of chosen checkpoints afterwards."""
    work = context.state(Work)

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            work.choices.clear()

    return load_checkpoint


def _chosen(folder: Path, step: int | None, context: Context[Options]) -> Choice:
    """Choose a checkpoint on the first rank for all ranks.

    Raises:
        RunError: no checkpoint is complete, or the checkpoint of iteration ``step`` is incomplete. All ranks
            raise it.
    """
    # With --use-checkpoint-args each rank chooses by itself before process groups exist. It compares sizes
    # only, and the choice is not kept: a checkpoint that a killed job moved aside is moved back later.
    if "RANK" in os.environ and not dist.is_initialized():
        try:
            return whole_checkpoints.choose(folder, step)
        except MindSpeedDSAError:
            show_without_traceback()
            raise
    choices = context.state(Work).choices
    outcome: list[Choice | Exception | None] = [choices.get((folder, step))]
    together = dist.is_initialized() and dist.get_world_size() > 1
    if outcome[0] is None and not (together and dist.get_rank()):
        try:
            outcome[0] = whole_checkpoints.choose(folder, step, context.options.verify)
        except MindSpeedDSAError as error:
            outcome[0] = error
    # Broadcast errors too, so that all ranks raise together.
    if together:
        dist.broadcast_object_list(outcome, src=0)
    choice = outcome[0]
    if isinstance(choice, Exception):
        show_without_traceback()
        raise choice
    assert choice is not None
    if (folder, step) not in choices:
        say = context.log.warning if choice.passed or choice.unverified else context.log.info
        say("%s", whole_checkpoints.describe(folder, choice))
    choices[folder, step] = choice
    return choice
