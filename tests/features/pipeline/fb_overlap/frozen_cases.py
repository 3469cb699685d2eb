"""A training step of a model of which a part does not learn; runs in the pool's workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from tests.features.pipeline.fb_overlap import cases
from tests.support import model


def trained(frozen: Sequence[str], **arguments: Any) -> dict[str, Any]:
    """As ``cases.trained``, with weights frozen whose names have one of these parts."""
    build, found = model.gpt_model, model.gradients

    def gpt_model(*given: Any, **more: Any) -> Any:
        built = build(*given, **more)
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        return built

    def gradients(chunks: Any, only: str = "") -> dict[str, Any]:
        learning = {
            name
            for chunk in chunks
            for name, parameter in model.global_names(chunk).items()
            if parameter.requires_grad
        }
        with mock.patch.object(model, "global_names", lambda chunk: _part(chunk, learning)):
            return found(chunks, only)

    names = model.global_names

    def _part(chunk: Any, learning: set[str]) -> dict[str, Any]:
        return {name: each for name, each in names(chunk).items() if name in learning}

    with mock.patch.object(model, "gpt_model", gpt_model), mock.patch.object(model, "gradients", gradients):
        return cases.trained(**arguments)
