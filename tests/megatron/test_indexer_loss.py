"""The indexer loss of one step, next to the sum that trackers keep for the log."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.megatron.indexer_loss import keep_step_loss, take_step_loss
from tests.support.contexts import context


def track_indexer_metrics(loss: float, total_loss_dict: dict[str, Any] | None = None) -> None:
    """Add the loss to the log's sum, as Megatron's tracker does."""
    if total_loss_dict is not None:
        total_loss_dict["indexer loss"] = total_loss_dict.get("indexer loss", 0) + torch.tensor(loss)


def test_the_sum_stays_and_the_step_has_its_own() -> None:
    track = keep_step_loss(track_indexer_metrics, context("step-metrics"))
    total: dict[str, Any] = {}
    for step, loss in enumerate((0.25, 0.5), 1):
        track(loss, total_loss_dict=total)
        assert take_step_loss(Megatron()) == loss
        assert total["indexer loss"] == (0.25, 0.75)[step - 1]
    assert take_step_loss(Megatron()) is None, "it is taken once"


def test_without_a_sum_nothing_is_kept() -> None:
    keep_step_loss(track_indexer_metrics, context("step-metrics"))(0.5)
    assert take_step_loss(Megatron()) is None


def test_the_feature_that_keeps_it_need_not_be_the_one_that_takes_it() -> None:
    """A backport's tracker keeps the loss only for the recorder of the same Megatron's steps."""
    keep_step_loss(track_indexer_metrics, context("dsa-backport"))(0.5, total_loss_dict={})
    keep_step_loss(track_indexer_metrics, context("dsa-backport", root="corp_megatron"))(
        2.0, total_loss_dict={}
    )
    assert take_step_loss(Megatron("corp_megatron")) == 2.0
    assert take_step_loss(Megatron()) == 0.5
