"""Our tracker, replacing the static methods of Megatron's ``DSAIndexerLossLoggingHelper``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.loss_tracker import LossTracker


def _tracker(context: Context[None]) -> LossTracker:
    dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")
    return LossTracker(context.megatron, dsa.DSAIndexerLossLoggingHelper)


def save_loss(context: Context[None]) -> Callable[..., None]:
    """Replaces ``save_loss_to_tracker``."""
    ours = _tracker(context)

    def save_loss_to_tracker(
        loss: Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: ProcessGroup | None = None,
        avg_group: ProcessGroup | None = None,
    ) -> None:
        ours.save_loss_to_tracker(loss, layer_number, num_layers, reduce_group, avg_group)

    return save_loss_to_tracker


def clean_loss(context: Context[None]) -> Callable[..., None]:
    """Replaces ``clean_loss_in_tracker``."""
    ours = _tracker(context)

    def clean_loss_in_tracker() -> None:
        ours.clean_loss_in_tracker()

    return clean_loss_in_tracker


def reduce_loss(context: Context[None]) -> Callable[..., None]:
    """Replaces ``reduce_loss_in_tracker``."""
    ours = _tracker(context)

    def reduce_loss_in_tracker() -> None:
        ours.reduce_loss_in_tracker()

    return reduce_loss_in_tracker


def track_metrics(context: Context[None]) -> Callable[..., None]:
    """Replaces ``track_indexer_metrics``."""
    ours = _tracker(context)

    def track_indexer_metrics(
        loss_scale: float,
        iteration: int,
        writer: Any,
        wandb_writer: Any = None,
        total_loss_dict: dict[str, Tensor] | None = None,
        per_layer_logging: bool = False,
    ) -> None:
        ours.track_indexer_metrics(
            loss_scale, iteration, writer, wandb_writer, total_loss_dict, per_layer_logging
        )

    return track_indexer_metrics
