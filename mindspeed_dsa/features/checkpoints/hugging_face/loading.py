"""Loading of Hugging Face weights into a newly built model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from mindspeed_dsa import log as package_log
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.checkpoints.agreement import decided, is_first, together
from mindspeed_dsa.features.checkpoints.hugging_face.config import FILE, arguments_of
from mindspeed_dsa.features.checkpoints.hugging_face.contradictions import (
    differing_copies,
    first_contradiction,
)
from mindspeed_dsa.features.checkpoints.hugging_face.feature import Load
from mindspeed_dsa.features.checkpoints.hugging_face.files import weights_of
from mindspeed_dsa.features.checkpoints.hugging_face.mismatch import (
    Mismatch,
    adds_indexers,
    mismatches,
    wrong_shapes,
)
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape, listed
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import fill, pieces_of, state_of
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import show_without_traceback
from mindspeed_dsa.runs.files import RunError, amount
from mindspeed_dsa.runs.whole_checkpoints import TRACKER

_WHO = "mindspeed_dsa load-hf"


def fill_model(original: Callable[..., Any], context: Context[Load]) -> Callable[..., Any]:
    """Decorate Megatron's model builder to fill the first model that it builds."""

    def build(*args: Any, **kwargs: Any) -> Any:
        chunks = original(*args, **kwargs)
        job = context.megatron("training").get_args()
        state = context.state(_Once)
        if state.done:
            return chunks
        state.done = True
        if goes_on(job):
            context.log.info("--load %s has a checkpoint: --load-hf is not read", job.load)
            return chunks
        try:
            load(chunks, context.options.folder, job, context.log, context.megatron)
        except RunError:
            show_without_traceback()
            raise
        return chunks

    return build


def require_weights(original: Callable[..., Any], context: Context[Load]) -> Callable[..., Any]:
    """Decorate ``setup_model_and_optimizer`` to fail if the model was built without loading weights."""

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        context.state(_Once).done = False  # --inprocess-restart sets up a job again in the same process
        result = original(*args, **kwargs)
        if not context.state(_Once).done:
            show_without_traceback()
            raise RunError(
                f"{_WHO}: this release has built the model in a way that is not known here, and its "
                f"weights are drawn; import {context.options.folder} with weights import, and "
                "name the checkpoint in --load"
            )
        return result

    return setup_model_and_optimizer


class _Once:
    """Session state that records whether the weights of the job's model were loaded."""

    def __init__(self, context: Context[Load]) -> None:
        self.done = False


def goes_on(job: Any) -> bool:
    """Return whether the first rank finds a checkpoint in ``--load``. All ranks must call this function."""
    folder = argument(job, "load")
    return bool(folder) and decided(lambda: (Path(folder) / TRACKER).is_file(), _WHO)


def load(
    chunks: Any, folder: Path, job: Any, log: Log | None = None, megatron: Megatron | None = None
) -> None:
    """Read a model's weights into this rank's chunks, before the optimizer is built; all ranks must call it.

    Args:
        chunks: model chunks of this rank, wrapped or not.
        folder: folder of the files.
        job: Megatron's arguments of the model.
        log: logger for the duration; default: the package's logger.
        megatron: Megatron package of the model.

    Raises:
        RunError: on all ranks, if the files do not fit the model, are damaged, or have NaN or infinities.
    """
    log, megatron = log or package_log.get(), megatron or Megatron()
    began = time.perf_counter()
    files = together(lambda: weights_of(folder), _WHO)
    shape = together(lambda: Shape.of(job, files.architecture), _WHO)
    together(lambda: _require_none(filter(None, [first_contradiction(files)]), folder), _WHO)
    # Also before training, where Megatron's own loop loads: a loop of one's own calls this alone.
    arguments = together(lambda: arguments_of(files.described, f"{_WHO}: {folder / FILE}"), _WHO)
    release = versions.of_megatron(megatron.root) or ""
    together(lambda: _require_none(mismatches(arguments, job, release), folder), _WHO)
    gaps = Mismatch.of(shape, files)
    # A dense model's files lack all indexers, which are then initialised.
    together(lambda: _require_none(gaps.problems(adds_indexers(arguments, job)), folder), _WHO)
    # Copies are large, and all ranks would read the same: 4 x 1.9 GB in DeepSeek-V3.
    together(lambda: _require_none(differing_copies(files, shape) if is_first() else (), folder), _WHO)
    models = [_unwrapped(chunk) for chunk in chunks]
    for module in (module for model in models for module in model.modules()):
        # Megatron's half precision wrapper has rounded the bias. Before 0.14 only a forward pass widens it.
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    states = [state_of(model, megatron) for model in models]
    pieces = (piece for state in states for _, parts in pieces_of(state, megatron) for piece in parts)
    with torch.no_grad():
        together(lambda: _require_none(wrong_shapes(pieces, files, shape), folder), _WHO)
        filled = together(lambda: sum(fill(state, files, shape, megatron) for state in states), _WHO)
        together(lambda: files.require_finite(_WHO), _WHO)
    if gaps.indexers:
        log.info("%s has no indexers: those of %d layers are initialised", folder, len(gaps.indexers))
    for note in gaps.notes():
        log.info("%s: %s", folder, note)
    if gaps.predictions:
        log.info(
            "%s has %d more layers of multi-token prediction, which are not read", folder, gaps.predictions
        )
    seconds = time.perf_counter() - began
    log.info("%s: %s of weights on this rank in %.1f s", folder, amount(filled), seconds)


def _require_none(problems: Iterable[str], folder: Path) -> None:
    if found := list(problems):
        raise RunError(f"{_WHO}: {folder}: {listed(found)}")


def _unwrapped(chunk: Any) -> Any:
    """Return the model without its data parallel and half precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
