"""Collects each layer's indexer loss over a step's microbatches, and averages it for the log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, get_backend

from mindspeed_dsa.feature import Megatron

_NAME = "indexer loss"


class LossTracker:
    """The functions of Megatron's ``DSAIndexerLossLoggingHelper``, and its state where Megatron lacks it.

    Args:
        megatron: the session's.
        home: Megatron's class, which then holds the state and is called, so that patches of it apply.

    Attributes:
        tracker: ``values``, one sum per layer, and ``reported``, 1 for each layer that added to its sum since
            the last clean-up; unused with a ``home``.
    """

    def __init__(self, megatron: Megatron, home: Any = None) -> None:
        self._megatron = megatron
        self._home: Any = self if home is None else home
        self.tracker: dict[str, Any] = {}

    def save_loss_to_tracker(
        self,
        loss: Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: ProcessGroup | None = None,
        avg_group: ProcessGroup | None = None,
    ) -> None:
        """Add one microbatch's loss of one layer.

        Args:
            loss: scalar.
            layer_number: 1-based; MTP layers follow the decoder's. ``None``: not logged.
            num_layers: decoder layers of the model.
            reduce_group: group whose losses add up, or ``None``.
            avg_group: group over whose losses the mean is taken, or ``None``.
        """
        if layer_number is None:
            return
        tracker = self._home.tracker
        _grow(tracker, max(num_layers, layer_number), loss.device)
        tracker["values"][layer_number - 1] += loss.detach()
        tracker["reported"][layer_number - 1] = 1
        tracker["reduce_group"], tracker["avg_group"] = reduce_group, avg_group

    def clean_loss_in_tracker(self) -> None:
        """Start the next step at zero."""
        tracker = self._home.tracker
        for name in ("values", "reported"):
            if name in tracker:
                tracker[name].zero_()
        tracker["reduce_group"] = tracker["avg_group"] = None

    def reduce_loss_in_tracker(self) -> None:
        """Reduce the losses of all layers to every rank; a collective of all ranks, reporting or not."""
        tracker = self._home.tracker
        if "values" in tracker:
            # Parts of one stage's loss, before stages are combined: only this stage knows the groups.
            _reduce(tracker["values"], tracker.get("reduce_group"))
            _reduce(tracker["values"], tracker.get("avg_group"), mean=True)

        state = self._megatron("core.parallel_state")
        pipeline = state.get_pipeline_model_parallel_group()
        size = len(tracker.get("values", ()))
        if pipeline.size() > 1:
            longest = torch.tensor(size, device=_device_of(pipeline))
            all_reduce(longest, op=ReduceOp.MAX, group=pipeline)
            size = int(longest)
        if size == 0:
            return
        _grow(tracker, size, _device_of(pipeline))
        for name in ("values", "reported"):
            _reduce(tracker[name], pipeline)
        _reduce(tracker["values"], state.get_data_parallel_group(with_context_parallel=False), mean=True)

    def track_indexer_metrics(
        self,
        loss_scale: float,
        iteration: int,
        writer: Any,
        wandb_writer: Any = None,
        total_loss_dict: dict[str, Tensor] | None = None,
        per_layer_logging: bool = False,
    ) -> None:
        """Log the mean over the layers that have an indexer, and start again at zero.

        A collective of all ranks.

        Args:
            loss_scale: factor of a layer's sum: one over the number of microbatches.
            iteration: the step the figure belongs to.
            writer: TensorBoard writer, or ``None``.
            wandb_writer: Weights & Biases writer, or ``None``.
            total_loss_dict: the mean is added to its ``"indexer loss"``.
            per_layer_logging: also write each layer's figure to TensorBoard.
        """
        self._home.reduce_loss_in_tracker()
        tracker = self._home.tracker
        if "values" not in tracker:
            return
        losses = tracker["values"] * loss_scale
        mean = losses.sum() / tracker["reported"].sum().clamp(min=1)
        if total_loss_dict is not None:
            total_loss_dict[_NAME] = total_loss_dict[_NAME] + mean if _NAME in total_loss_dict else mean
        if writer is not None:
            writer.add_scalar(_NAME, mean, iteration)
            if per_layer_logging:
                for layer, loss in enumerate(losses):
                    if tracker["reported"][layer]:
                        writer.add_scalar(f"{_NAME}/layer {layer + 1}", loss, iteration)
        if wandb_writer is not None:
            wandb_writer.log({_NAME: mean}, iteration)
        self._home.clean_loss_in_tracker()


def _grow(tracker: dict[str, Any], size: int, device: torch.device | int) -> None:
    """Grow to ``size`` layers; existing values keep their device."""
    for name in ("values", "reported"):
        old = tracker.get(name)
        if old is None:
            tracker[name] = torch.zeros(size, device=device)
        elif len(old) < size:
            tracker[name] = torch.cat([old, old.new_zeros(size - len(old))])


def _reduce(values: Tensor, group: ProcessGroup | None, mean: bool = False) -> None:
    """Sum or mean over a group; a sum and a division, because gloo does not support a mean."""
    if group is not None and group.size() > 1:
        all_reduce(values, group=group)
        if mean:
            values /= group.size()


def _device_of(group: ProcessGroup) -> torch.device | int:
    return torch.device("cpu") if get_backend(group) == "gloo" else torch.cuda.current_device()
