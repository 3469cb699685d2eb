"""Weights of Hugging Face's files in a model that has just been built."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from mindspeed_dsa import log as package_log
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.checkpoints.agreement import decided, together
from mindspeed_dsa.features.checkpoints.hugging_face.feature import Load
from mindspeed_dsa.features.checkpoints.hugging_face.files import weights_of
from mindspeed_dsa.features.checkpoints.hugging_face.mismatch import Mismatch, wrong_shapes
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape, listed
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import fill, pieces_of, state_of
from mindspeed_dsa.log import Log
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.errors import show_without_traceback
from mindspeed_dsa.runs.files import RunError, amount
from mindspeed_dsa.runs.whole_checkpoints import TRACKER

_WHO = "mindspeed_dsa load-hf"


def fill_model(original: Callable[..., Any], context: Context[Load]) -> Callable[..., Any]:
    """Decorate what builds a model for Megatron's training loop: the first one gets its weights."""

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
    """Decorate ``setup_model_and_optimizer`` of Megatron's training loop, which has a model built."""

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
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
    """State of a session: the weights have been read, or not yet."""

    def __init__(self, context: Context[Load]) -> None:
        self.done = False


def goes_on(job: Any) -> bool:
    """Return whether a job has a checkpoint to go on from, as its first rank sees it; all ranks call it."""
    folder = argument(job, "load")
    return bool(folder) and decided(lambda: (Path(folder) / TRACKER).is_file(), _WHO)


def load(
    chunks: Any, folder: Path, job: Any, log: Log | None = None, megatron: Megatron | None = None
) -> None:
    """Read a model's weights into chunks that this rank holds, before its optimizer is made.

    Args:
        chunks: of the model, in whatever wrappers; all ranks call it together.
        folder: folder of the files.
        job: Megatron's arguments of the model.
        log: logger that says how long it took; default: the package's.
        megatron: whose model it is.

    Raises:
        RunError: the files do not fit, or are damaged; on all ranks.
    """
    log, megatron = log or package_log.get(), megatron or Megatron()
    began = time.perf_counter()
    shape = Shape.of(job)
    files = together(lambda: weights_of(folder), _WHO)
    found = Mismatch.of(shape, files)
    # Of a dense model's files all indexers are missing; a few that are not there are a damage.
    dense = not any(".indexer." in name for name in files.names)
    together(lambda: _require_none(found.problems(dense), folder), _WHO)
    models = [_unwrapped(chunk) for chunk in chunks]
    for module in (each for model in models for each in model.modules()):
        # Megatron's wrapper for half precision has rounded it; before 0.14 only a forward pass widens it.
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    states = [state_of(model, megatron) for model in models]
    pieces = (piece for state in states for _, each in pieces_of(state, megatron) for piece in each)
    with torch.no_grad():
        together(lambda: _require_none(wrong_shapes(pieces, files, shape.layers), folder), _WHO)
        filled = together(lambda: sum(fill(state, files, shape.layers, megatron) for state in states), _WHO)
    if found.indexers:
        log.info("%s has no indexers: those of %d layers are initialised", folder, len(found.indexers))
    if found.predictions:
        log.info(
            "%s has %d more layers of multi-token prediction, which are not read", folder, found.predictions
        )
    seconds = time.perf_counter() - began
    log.info("%s: %s of weights on this rank in %.1f s", folder, amount(filled), seconds)


def _require_none(problems: Iterable[str], folder: Path) -> None:
    if found := list(problems):
        raise RunError(f"{_WHO}: {folder}: {listed(found)}")


def _unwrapped(chunk: Any) -> Any:
    """Return the model below data parallelism and half precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
