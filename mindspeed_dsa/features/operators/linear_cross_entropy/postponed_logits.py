"""Lazy logits, and a loss in chunks that does not need them.

While a model computes its loss, its output layer returns :class:`PostponedLogits`: hidden states and weight.
Megatron passes them to ``compute_language_model_loss``, which computes the loss from them in chunks. Any
other operation on them computes the full logits.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.operators.linear_cross_entropy.feature import Options, forms_in_forward
from mindspeed_dsa.megatron import releases, vocabulary_shards
from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.ops.linear_cross_entropy import TokenLosses, linear_cross_entropy
from mindspeed_dsa.parallel.weight_gradients import placeholder


def postpone_logits(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate the method of ``GPTModel`` that calls the output layer and the loss."""
    names = tuple(inspect.signature(original).parameters)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names[1:], args, strict=False)), **kwargs}
        layer = getattr(self, "output_layer", None)
        if arguments.get("labels") is None or layer is None or _has_gathered_logits(layer, arguments):
            return original(self, *args, **kwargs)
        head = _Head(layer, arguments.get("loss_mask"), context)

        def loss(labels: Tensor, logits: Any) -> Tensor:
            if isinstance(logits, PostponedLogits):
                return logits.loss(labels)
            found: Tensor = self.compute_language_model_loss(labels, logits)
            return found

        return original(
            AttributeOverride(self, output_layer=head, compute_language_model_loss=loss), *args, **kwargs
        )

    return run


def _has_gathered_logits(layer: Any, given: dict[str, Any]) -> bool:
    """Return whether the caller asked for logits gathered over tensor parallel ranks."""
    gathers = given.get("runtime_gather_output")
    return bool(layer.gather_output if gathers is None else gathers) and _ranks(layer) > 1


def _ranks(layer: Any) -> int:
    return int(layer.output_size // layer.output_size_per_partition)


class _Head:
    """Wrapper of an output layer that returns postponed logits; other attributes are the layer's.

    Args:
        layer: ``ColumnParallelLinear``.
        loss_mask: mask ``[batch, sequence]`` that the losses will be multiplied with, or None.
        context: feature's context.
    """

    def __init__(self, layer: Any, loss_mask: Tensor | None, context: Context[Options]) -> None:
        self.layer, self.loss_mask, self.context = layer, loss_mask, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Any, None]:
        return PostponedLogits(self, hidden, weight, kwargs), None

    def losses(
        self, hidden: Tensor, weight: Tensor | None, labels: Tensor, scale: float
    ) -> tuple[Tensor, TokenLosses]:
        """Return the losses ``[batch, sequence]``, and the :class:`TokenLosses` with the largest logits.

        The loss is computed inside a call of the layer, so that FSDP's hooks gather the layer's weight.

        Args:
            hidden: hidden states ``[sequence, batch, hidden]``; this rank's part under sequence parallelism.
            weight: this rank's weight ``[vocabulary, hidden]``, or None for the layer's own.
            labels: labels ``[batch, sequence]``.
            scale: factor of the logits.
        """
        collected: list[TokenLosses] = []

        def forward(rows: Tensor) -> Tensor:
            layer_weight = self.layer.weight if weight is None else weight
            result = self._losses(rows, layer_weight, labels, scale)
            collected.append(result)
            return result.loss.view(labels.shape[::-1]).t().contiguous()

        with _as_forward(self.layer, forward):
            loss: Tensor = self.layer(hidden)
        return loss, collected[0]

    def _losses(self, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> TokenLosses:
        layer, megatron = self.layer, self.context.megatron
        if getattr(layer, "gtp_remat_size", 1) > 1:
            raise RuntimeError(
                "fused-linear-cross-entropy: generalized tensor parallelism keeps a part of the output "
                "layer's weight on each rank; omit it, or --fused-linear-cross-entropy"
            )
        mappings = megatron("core.tensor_parallel.mappings")
        group = getattr(layer, "tp_group", None)
        if group is None:
            group = megatron("core.parallel_state").get_tensor_model_parallel_group()
        if layer.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden, group=group)
        elif releases.takes(mappings.copy_to_tensor_model_parallel_region, "group"):
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=group)
        else:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden)
        mask = self.loss_mask
        if mask is not None and mask.shape != labels.shape:
            mask = None
        # Labels and mask are [batch, sequence], the losses are computed in the order [sequence, batch].
        labels, mask = labels.t(), None if mask is None else mask.t()
        group, shard = group if _ranks(layer) > 1 else None, vocabulary_shards.shard_of(weight)
        if shard is not None:
            hidden = vocabulary_shards.gather_rows(hidden, shard.context_group)
            labels = vocabulary_shards.gathered(labels, shard.context_group)
            mask = None if mask is None else vocabulary_shards.gathered(mask, shard.context_group)
            group = shard.group
        tokens, width = labels.numel(), hidden.shape[-1]
        in_forward = forms_in_forward(self.context.options.gradient, tokens, width, hidden.element_size())
        losses = linear_cross_entropy(
            hidden.reshape(-1, width),
            weight,
            labels.reshape(-1),
            token_weights=None if mask is None else mask.reshape(-1),
            logit_scale=scale,
            group=group,
            first=None if shard is None else shard.first,
            gradient="forward" if in_forward else "backward",
            wants_top=bool(layer.config.mtp_num_layers),
            accumulator=_accumulator(layer, weight, megatron),
        )
        if shard is None:
            return losses
        return TokenLosses(*(vocabulary_shards.own_rows(each, shard.context_group) for each in losses))


@contextlib.contextmanager
def _as_forward(layer: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a layer's ``forward`` inside the block; the layer's hooks still run."""
    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


class PostponedLogits:
    """This rank's logits ``[sequence, batch, vocabulary]``, computed only if they are read.

    Passed through Megatron's code in place of a tensor. Multiplication by a number is lazy too. ``max`` over
    the vocabulary needs no logits, because the loss computes it as a by-product.
    """

    def __init__(
        self,
        head: _Head,
        hidden: Tensor,
        weight: Tensor | None,
        arguments: dict[str, Any],
        scale: float = 1.0,
    ) -> None:
        self._head, self._hidden, self._weight, self._arguments = head, hidden, weight, arguments
        self._scale = scale
        self._tops: TokenLosses | None = None
        self._rows: tuple[int, int] = (0, 0)

    def loss(self, labels: Tensor) -> Tensor:
        """Return the fp32 loss ``[batch, sequence]`` for labels of the same shape."""
        loss, found = self._head.losses(self._hidden, self._weight, labels, self._scale)
        self._tops = TokenLosses(found.loss.detach(), found.top, found.top_index)
        self._rows = (labels.shape[1], labels.shape[0])
        return loss

    def whole(self) -> Tensor:
        """Compute the full logits, with a warning."""
        self._head.context.log.warning(
            "the logits of all tokens are computed once more, since they are read beside the loss", once=True
        )
        logits: Tensor = self._head.layer(self._hidden, weight=self._weight, **self._arguments)[0]
        return logits if self._scale == 1 else logits * self._scale

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one axis."""
        layer, (rows, batch) = self._head.layer, self._hidden.shape[:2]
        shard = vocabulary_shards.shard_of(layer.weight if self._weight is None else self._weight)
        ranks = _ranks(layer) // (1 if shard is None else shard.cut.pieces) if layer.sequence_parallel else 1
        sizes = torch.Size((rows * ranks, batch, layer.output_size_per_partition))
        return sizes if dim is None else sizes[dim]

    def max(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``Tensor.max`` of the logits; over the last axis, use the result that the loss computed."""
        if self._tops is not None and (args, kwargs) in (((-1,), {}), ((), {"dim": -1})):
            return self._tops.top.view(self._rows), self._tops.top_index.view(self._rows)
        return self.whole().max(*args, **kwargs)

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, (int, float)):
            scale = self._scale * factor
            return PostponedLogits(self._head, self._hidden, self._weight, self._arguments, scale)
        return self.whole() * factor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection must not compute the logits
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is torch.argmax and isinstance(first, PostponedLogits) and kwargs == {"dim": -1}:
            return first.max(dim=-1)[1]
        return func(*(each.whole() if isinstance(each, PostponedLogits) else each for each in args), **kwargs)


class _MainGrad:
    """Accumulator for the weight's gradient, in Megatron's ``main_grad`` buffer."""

    def __init__(self, weight: Any, megatron: Megatron) -> None:
        # Keep main_grad: a weight shared by several layers may lose the attribute before its last backward.
        self._weight, self._main_grad, self._megatron = weight, weight.main_grad, megatron

    def target(self) -> Tensor:
        main_grad: Tensor = self._main_grad
        return main_grad

    def result(self) -> Tensor | None:
        self._weight.main_grad = self._main_grad
        return placeholder(self._weight, self._weight.dtype, self._megatron)


def _accumulator(layer: Any, weight: Tensor, megatron: Megatron) -> _MainGrad | None:
    """Return the accumulator under gradient accumulation fusion; None if autograd returns the gradient."""
    if not layer.gradient_accumulation_fusion or getattr(weight, "main_grad", None) is None:
        return None
    return _MainGrad(weight, megatron)
