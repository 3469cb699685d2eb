"""Losses of each release, multi-token prediction's included, without whole logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

from tests.matrix import steps
from tests.matrix.record import Note
from tests.support.model import assert_same_gradients

pytestmark = pytest.mark.releases(">=0.12.1")

NAME = "fused-linear-cross-entropy"
MTP = steps.TWO_AND_MTP
LOSSES = 1 + MTP["mtp_num_layers"]
MODELS: dict[str, Mapping[str, Any]] = {
    "as it is": {},
    "logits scaled by muP": {"use_mup": True, "mup_base_hidden_size": 16},
    "heads of multi-token prediction detached": {"mtp_detach_heads": True},
}


def without_logits(switches: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """Run a step, and fail if anything reads whole logits."""
    from mindspeed_dsa.features.operators.linear_cross_entropy.postponed_logits import PostponedLogits

    def whole(self: PostponedLogits) -> None:
        raise RuntimeError("somebody reads whole logits")

    with mock.patch.object(PostponedLogits, "whole", whole):
        return steps.step(switches, **arguments)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gradient", ["forward", "backward"])
def test_the_step_with_whole_logits(pool: Any, note: Note, model: str, gradient: str) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    if missing := MODELS[model].keys() - TransformerConfig.__dataclass_fields__.keys():
        pytest.skip(f"this release has no {', '.join(sorted(missing))}")
    note.begins("TP2+SP", NAME)
    asked = {"overrides": {**MTP, **MODELS[model]}, "num_microbatches": 2, "micro_batch_size": 2, "tp": 2}
    theirs = pool.baseline("tests.matrix.steps:step", 2, **asked)
    switches = {"fused_linear_cross_entropy": True, "fused_linear_cross_entropy_gradient": gradient}
    ours = pool.run(f"{__name__}:without_logits", 2, switches=switches, **asked)
    for mine, stock in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(stock["losses"], rel=1e-6)
        assert_same_gradients(mine["gradients"], stock["gradients"], rtol=1e-5)
        assert mine["counts"]["operator linear_cross_entropy"] == 2 * LOSSES
    note.trained(ours)
