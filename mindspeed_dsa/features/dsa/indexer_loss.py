"""Gradient scale, logging and backward of the indexer loss.

:mod:`.loss` computes the loss. Scale and log are stored in Megatron's own classes, where Megatron's DSA reads
them. For releases without DSA, this module has replacements with the same attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, get_backend

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.megatron.served_index import Delivery
from mindspeed_dsa.ops.precision import wide
from mindspeed_dsa.patches import versions

WITHOUT_DSA, TAKES_SUMS = "<0.16", ">=0.19"
"""Releases of Megatron-core without DSA, and releases whose loss scale expects sums with per-token loss."""


def coefficient(config: Any) -> float:
    """Return ``dsa_indexer_loss_coeff``, with 0 for None and negative values (no loss)."""
    return max(config.dsa_indexer_loss_coeff or 0.0, 0.0)


class LossScale:
    """Replacement for Megatron's ``DSAIndexerLossAutoScaler`` in releases that lack it."""

    def __init__(self) -> None:
        self.main_loss_backward_scale: Tensor | None = None

    def set_loss_scale(self, scale: Tensor) -> None:
        """Set the factor of the loss gradient. Schedules call this before each microbatch's backward."""
        if self.main_loss_backward_scale is None:
            self.main_loss_backward_scale = scale.detach().clone()
        else:
            # In place, because CUDA graphs read the scale where it was when they were captured.
            self.main_loss_backward_scale.copy_(scale)


class IndexerLoss:
    """Gradient scale and log of the indexer loss, one per Megatron; see :func:`indexer_loss`.

    Attributes:
        megatron: accessor of the Megatron modules.
        sums_over_tokens: whether gradients must be sums over tokens, because Megatron divides them by the
            number of tokens at the end of the step. Set in every forward step, read in backward.
    """

    def __init__(self, megatron: Megatron) -> None:
        self.megatron = megatron
        self.sums_over_tokens = False
        release, old = versions.of_megatron(megatron.root), SpecifierSet(WITHOUT_DSA, prereleases=True)
        self._lacks_dsa = release is not None and old.contains(release)
        new = SpecifierSet(TAKES_SUMS, prereleases=True)
        self._takes_sums = release is not None and new.contains(release)
        self._scale, self._tracker = LossScale(), LossTracker(megatron)

    @property
    def scale(self) -> Any:
        """Megatron's ``DSAIndexerLossAutoScaler``, or a :class:`LossScale` in releases without DSA."""
        return self._scale if self._lacks_dsa else self._dsa().DSAIndexerLossAutoScaler

    @property
    def tracker(self) -> Any:
        """Megatron's ``DSAIndexerLossLoggingHelper``, or a :class:`LossTracker` in releases without DSA."""
        return self._tracker if self._lacks_dsa else self._dsa().DSAIndexerLossLoggingHelper

    def _dsa(self) -> Any:
        return self.megatron("core.transformer.experimental_attention_variant.dsa")

    def takes_sums(self, config: Any) -> bool:
        """Return whether Megatron's loss scale expects losses that are sums over tokens."""
        return self._takes_sums and bool(config.calculate_per_token_loss)

    def gradient(self, loss: Tensor, rows: int) -> Tensor:
        """Return the gradient of an indexer loss with which its backward starts.

        Args:
            loss: scalar, sum over this rank's tokens divided by ``rows``.
            rows: number of tokens in the microbatch that count in the loss, over all context parallel ranks.

        Returns:
            Scalar: the loss scale set by the schedule, times ``rows`` if ``sums_over_tokens``.
        """
        scale = self.scale.main_loss_backward_scale
        gradient = torch.ones_like(loss)
        if scale is not None:
            gradient = gradient * scale.to(loss.device)
        # The loss is a mean. Where the step divides by the number of tokens later, undo the mean's division.
        return gradient * rows if self.sums_over_tokens else gradient

    def attach(
        self,
        output: Tensor,
        loss: Tensor,
        rows: int,
        deliveries: Sequence[Delivery] = (),
    ) -> Tensor:
        """Return ``output`` with the loss attached: its backward also runs backward of the loss.

        Args:
            output: output of the layer's attention, or of the layer.
            loss: see :meth:`gradient`.
            rows: see :meth:`gradient`.
            deliveries: gradients for another layer's indexer, which backward delivers, times the loss's
                gradient, before it continues below ``output``.
        """
        return _AttachedLoss.apply(output, loss, rows, self, deliveries)  # type: ignore[no-any-return]

    def log(self, loss: Tensor, layer: Any, group: ProcessGroup | None) -> None:
        """Add a loss to the sum that is logged for the layer.

        Args:
            loss: scalar, this rank's share of the loss.
            layer: ``DSAttention`` module; ``layer_number`` and ``config`` are read.
            group: process group over which shares are summed; None for a single rank.
        """
        self.tracker.save_loss_to_tracker(
            loss=loss,
            layer_number=layer.layer_number,
            num_layers=layer.config.num_layers,
            reduce_group=group,
        )


@cache
def indexer_loss(megatron: Megatron) -> IndexerLoss:
    """Return the :class:`IndexerLoss` of a Megatron; cached."""
    return IndexerLoss(megatron)


class _AttachedLoss(torch.autograd.Function):
    """Identity on the output. Backward also passes a gradient to the indexer loss."""

    # Megatron's DSAIndexerLossAutoScaler does the same without the factor `rows`.

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        loss: Tensor,
        rows: int,
        of: IndexerLoss,
        deliveries: Sequence[Delivery],
    ) -> Tensor:
        ctx.save_for_backward(loss, *(gradient for one in deliveries for gradient in one.gradients))
        ctx.rows, ctx.of = rows, of
        ctx.sinks = [(one.sums, one.run, len(one.gradients)) for one in deliveries]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        loss, *gradients = ctx.saved_tensors
        gradient = ctx.of.gradient(loss, ctx.rows)
        for sums, run, number in ctx.sinks:
            # On GPUs a product of 16 bits would round the loss scale, or overflow.
            sums.add(run, [one.to(wide(one.dtype)) * gradient for one in gradients[:number]])
            del gradients[:number]
        return grad_output, gradient, None, None, None


# -- a step without the loss -------------------------------------------------------------------


class _ZeroGradients(torch.autograd.Function):
    """Identity on the output. Backward also gives parameters zero gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        return grad_output, *(torch.zeros_like(parameter) for parameter in ctx.parameters)


def with_zero_gradients(output: Tensor, module: torch.nn.Module) -> Tensor:
    """Return ``output``, whose backward also gives the module's trained parameters zero gradients.

    Megatron's overlapped gradient reduction starts a bucket when all of its parameters have a gradient. A
    parameter without any gradient makes the step fail.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return _ZeroGradients.apply(output, *parameters) if parameters else output


# -- log ---------------------------------------------------------------------------------------

_NAME = "indexer loss"


class LossTracker:
    """Log of the indexer loss, with the functions of Megatron's ``DSAIndexerLossLoggingHelper``.

    Args:
        megatron: Megatron of the job.
        home: Megatron's class, if it exists. The state is then stored in it and its methods are called, so
            that other patches apply. None: this object stores the state.

    Attributes:
        tracker: state if ``home`` is None. ``values`` has one sum per layer. ``reported`` is 1 for each layer
            that has added to its sum since the last reset.
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
        """Add the loss of one microbatch to the sum of a layer.

        Args:
            loss: scalar loss.
            layer_number: layer number from 1; MTP layers are numbered after the decoder layers. None: not
                logged.
            num_layers: number of decoder layers of the model.
            reduce_group: process group over which losses are summed, or None.
            avg_group: process group over which losses are averaged, or None.
        """
        if layer_number is None:
            return
        tracker = self._home.tracker
        # MTP layers have numbers above num_layers.
        _grow(tracker, max(num_layers, layer_number), loss.device)
        tracker["values"][layer_number - 1] += loss.detach()
        tracker["reported"][layer_number - 1] = 1
        tracker["reduce_group"], tracker["avg_group"] = reduce_group, avg_group

    def clean_loss_in_tracker(self) -> None:
        """Reset the sums for the next step."""
        tracker = self._home.tracker
        for name in ("values", "reported"):
            if name in tracker:
                tracker[name].zero_()
        tracker["reduce_group"] = tracker["avg_group"] = None

    def reduce_loss_in_tracker(self) -> None:
        """Reduce the losses of all layers to every rank. Collective, also for ranks without layers."""
        tracker = self._home.tracker
        if "values" in tracker:
            # Before stages are combined: the layers' groups are only known to their own pipeline stage.
            _reduce(tracker["values"], tracker.get("reduce_group"))
            _reduce(tracker["values"], tracker.get("avg_group"), mean=True)

        state = self._megatron("core.parallel_state")
        pipeline = state.get_pipeline_model_parallel_group()
        size = len(tracker.get("values", ()))
        # Stages without an indexer have no values yet, stages with MTP have more: agree on the longest.
        if pipeline.size() > 1:
            longest = torch.full((), size, device=_device_of(pipeline))
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
        """Log the mean over all layers with an indexer, and reset the sums. Collective over all ranks.

        Args:
            loss_scale: factor of each layer's sum: 1 / number of microbatches.
            iteration: step number to log under.
            writer: TensorBoard writer, or None.
            wandb_writer: Weights & Biases writer, or None.
            total_loss_dict: dict of losses; the mean is added to its ``"indexer loss"``.
            per_layer_logging: whether to write each layer's loss to TensorBoard as well.
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


def forget_losses(original: Callable[..., None], context: Context[Any]) -> Callable[..., None]:
    """Decorate ``destroy_model_parallel`` to clear the log of a failed step before the next job."""

    def destroy_model_parallel(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        indexer_loss(context.megatron).tracker.tracker.clear()

    return destroy_model_parallel


def _grow(tracker: dict[str, Any], size: int, device: torch.device | int) -> None:
    """Extend the per-layer sums to ``size`` entries. Existing sums stay on their device."""
    for name in ("values", "reported"):
        old = tracker.get(name)
        if old is None:
            tracker[name] = torch.zeros(size, device=device)
        elif len(old) < size:
            tracker[name] = torch.cat([old, old.new_zeros(size - len(old))])


def _reduce(values: Tensor, group: ProcessGroup | None, mean: bool = False) -> None:
    """Sum or average ``values`` over a group, in place."""
    # gloo has no ReduceOp.AVG, so the mean is a sum and a division.
    if group is not None and group.size() > 1:
        all_reduce(values, group=group)
        if mean:
            values /= group.size()


def _device_of(group: ProcessGroup) -> torch.device | int:
    return torch.device("cpu") if get_backend(group) == "gloo" else torch.cuda.current_device()
