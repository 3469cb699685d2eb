"""Integration into Hugging Face transformers: runs attention and indexer of DSA models with our operators.

:func:`apply_dsa` converts models of the families in :mod:`.families`, through transformers' registry of
attention functions. See docs/hosts/transformers.md.
"""

from __future__ import annotations

from inspect import signature
from math import inf
from sys import maxsize
from types import MethodType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mindspeed_dsa.integrations.transformers.checks import check, check_indexer, family_of
from mindspeed_dsa.integrations.transformers.experts import DEFAULT, run_experts, wants_experts_here
from mindspeed_dsa.integrations.transformers.families import Family
from mindspeed_dsa.integrations.transformers.layers import (
    ATTRIBUTE,
    NAME,
    Layer,
    Losses,
    LossLayers,
    attend,
    count_rows,
    expand_kv,
    groups_of,
    select_keys,
    weights_of,
)
from mindspeed_dsa.integrations.transformers.loss_graph import (
    connect,
    detach_input,
    enter_layer,
    leave_attention,
    leave_layer,
)
from mindspeed_dsa.integrations.transformers.masks import ranges_mask
from mindspeed_dsa.ops.dsa import Stage

__all__ = ["NAME", "InUse", "Stage", "apply_dsa", "use"]


def apply_dsa(
    model: nn.Module,
    *,
    stage: Stage = "sparse",
    loss_coeff: float = 0.0,
    indexer_loss_layers: LossLayers = "own",
    backend: str = "auto",
    loss_coefficient: float | None = None,
) -> InUse:
    """Run a transformers model's key selection, attention and indexer loss with our operators.

    Weights, configuration, caches and all code outside of the attention layers stay unchanged. There is one
    exception: experts that use transformers' default ``grouped_mm`` on an NPU, for which torch_npu has no
    kernel, use our grouped matmul.

    Args:
        model: transformers model of a type in :data:`.FAMILIES`, or a module that contains one, as PEFT's
            wrappers do. Call it before or after FSDP2's ``fully_shard``.
        stage: stage of training. In ``"warmup"`` tokens attend to all visible keys, in ``"sparse"`` to the
            selected ones. It also applies to evaluation.
        loss_coeff: factor of the indexer loss, which is a sum over layers of the mean over tokens. With 0 no
            loss is computed. Otherwise each indexer with a trainable parameter has a loss in training mode,
            which is added to the ``loss`` that the model returns for ``labels``.
        indexer_loss_layers: layers whose attention an indexer learns from. ``"own"``: its own layer.
            ``"served"``: all layers that use its selection; each has its own loss, and the model's loss gets
            their mean. ``"served-sum"``: the same with their sum.
        backend: backend of the operators, see :data:`mindspeed_dsa.ops.backend.BackendName`.
        loss_coefficient: former name of ``loss_coeff``.

    Returns:
        Object with the losses and an ``undo`` method.

    Raises:
        ImportError: transformers is missing or of another release.
        ValueError: an option is invalid, or the model is not supported; the message lists the supported ones.
        BackendUnavailable: the backend is not available on the model's device.
    """
    if stage not in get_args(Stage):
        raise ValueError(f"apply_dsa(model, stage={stage!r}): choose sparse or warmup")
    if loss_coefficient is not None:
        if loss_coeff:
            raise ValueError("apply_dsa(model): loss_coefficient is another name of loss_coeff; pass one")
        loss_coeff = loss_coefficient
    if not 0 <= loss_coeff < inf:
        raise ValueError(f"apply_dsa(model, loss_coeff={loss_coeff}): it is 0 or positive, and finite")
    if indexer_loss_layers not in get_args(LossLayers):
        raise ValueError(
            f"apply_dsa(model, indexer_loss_layers={indexer_loss_layers!r}): choose own, served or served-sum"
        )
    theirs, family = family_of(model)
    kind = family.named(family.attention)
    attentions = {name: module for name, module in theirs.named_modules() if isinstance(module, kind)}
    groups = groups_of([attention for attention in attentions.values() if family.selects(attention)])
    check_indexer(theirs, family)
    check(theirs, attentions, groups, backend, loss_coeff > 0, indexer_loss_layers)
    losses = Losses(theirs, stage, float(loss_coeff), backend, weights_of(groups, indexer_loss_layers))
    served = {group[0] for group in groups if len(group) > 1 and indexer_loss_layers != "own"}
    return InUse(theirs, family, list(attentions.values()), losses, served)


use = apply_dsa
"""Former name of :func:`apply_dsa`."""


class InUse:
    """Handle of a model that uses our operators: stage and losses, and :meth:`undo`."""

    def __init__(
        self, model: Any, family: Family, attentions: list[Any], losses: Losses, served: set[int]
    ) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.moe import ExpertsInterface

        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, ranges_mask)
        decoder = family.named(family.decoder)
        (self._decoder,) = (module for module in model.modules() if isinstance(module, decoder))
        decoder = self._decoder
        self._losses, self._before = losses, decoder.config._attn_implementation
        self._attentions, self._parameters = attentions, list(signature(type(model).forward).parameters)[1:]
        indexer = family.named(family.indexer)
        self._hooks: list[Any] = []
        for attention in attentions:
            selects, topk = family.selects(attention), decoder.config.index_topk
            if not selects:
                topk = getattr(attention, family.window) or maxsize
            layer = Layer(losses, family, selects, topk, attention.layer_idx in served)
            setattr(attention, ATTRIBUTE, layer)
            # Bound methods in the instance's dictionary take precedence over the class's methods.
            attention.expand_kv = MethodType(expand_kv, attention)
            self._hooks.append(attention.register_forward_pre_hook(count_rows, with_kwargs=True))
            # Prepend, because the hooks of wrappers (FSDP2) must find the losses in the outputs' graphs.
            self._hooks.append(attention.register_forward_hook(leave_attention, prepend=True))
            for module in attention.modules():
                if isinstance(module, indexer):
                    setattr(module, ATTRIBUTE, layer)
                    setattr(module, _slot(module), MethodType(select_keys, module))
        self._layers = [decoder.get_submodule(f"layers.{x.layer_idx}") for x in attentions]
        for module, attention in zip(self._layers, attentions, strict=True):
            setattr(module, ATTRIBUTE, getattr(attention, ATTRIBUTE))
            self._hooks.append(module.register_forward_pre_hook(enter_layer, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(leave_layer, prepend=True))
        heads = [module for module in model.children() if decoder not in module.modules()]
        inside = [layer.get_submodule(name) for layer in self._layers for name in family.after_attention]
        after = [decoder.get_submodule(name) for name in family.after_layers]
        for module in [*inside, *after, *heads]:
            self._hooks.append(module.register_forward_pre_hook(detach_input))
        self._hooks.append(decoder.register_forward_pre_hook(self._begin))
        self._hooks.append(decoder.register_forward_hook(self._end, prepend=True))
        if decoder is not model:
            self._hooks.append(model.register_forward_hook(self._add_loss, with_kwargs=True, prepend=True))
        decoder.set_attn_implementation(NAME)
        self._has_experts = wants_experts_here(decoder)
        if self._has_experts:
            ExpertsInterface.register(NAME, run_experts)
            decoder.set_experts_implementation(NAME)

    @property
    def stage(self) -> Stage:
        """Stage of the training. It may be changed between a backward pass and the next forward pass."""
        return self._losses.stage

    @stage.setter
    def stage(self, stage: Stage) -> None:
        self._losses.stage = stage

    @property
    def losses(self) -> dict[int, Tensor]:
        """Indexer losses of the last forward pass by layer number: fp32 scalars with a graph.

        Each is a mean over tokens without padding. Empty if no loss was computed. A layer that shares another
        layer's selection has one only if its indexer learns from all layers that it serves.
        """
        return self._losses.found

    @property
    def loss(self) -> Tensor | None:
        """Sum of :attr:`losses` without the coefficient, or ``None`` if none was computed.

        If indexers learn from the mean over the layers that they serve, a loss of ``n`` such layers has
        weight ``1 / n``.
        """
        values = [loss * self._losses.weights[number] for number, loss in self._losses.found.items()]
        return torch.stack([value.to(values[0].device) for value in values]).sum() if values else None

    def undo(self) -> None:
        """Restore the model's original code, before :func:`apply_dsa`. A second call does nothing.

        An indexer that is its own FSDP2 unit stays gathered until its backward, because FSDP2 does not expose
        the previous setting. Call ``set_reshard_after_forward`` on it to change that.
        """
        for hook in self._hooks:
            hook.remove()
        for indexer in self._indexers():
            delattr(indexer, ATTRIBUTE)
            slot = _slot(indexer)
            delattr(indexer, slot)
            if slot != "forward":
                setattr(indexer, slot, MethodType(type(indexer).forward, indexer))
        for attention in self._attentions:
            del attention.expand_kv
            delattr(attention, ATTRIBUTE)
        for layer in self._layers:
            delattr(layer, ATTRIBUTE)
        if self._attentions and self._decoder.config._attn_implementation == NAME:
            self._decoder.set_attn_implementation(self._before)
        if self._has_experts and self._decoder.config._experts_implementation == NAME:
            self._decoder.set_experts_implementation(DEFAULT)
        self._has_experts = False
        self._hooks, self._attentions, self._layers, self._losses.found = [], [], [], {}

    def _indexers(self) -> list[Any]:
        """Return all indexers, including the copy that PEFT makes of an indexer that it trains entirely."""
        return [
            module
            for attention in self._attentions
            for module in attention.modules()
            if module is not attention and ATTRIBUTE in vars(module)
        ]

    def _begin(self, decoder: nn.Module, args: Any) -> None:
        losses, indexers = self._losses, self._indexers()
        losses.found, losses.collecting, losses.with_gradients = {}, True, torch.is_grad_enabled()
        if losses.coefficient == 0 or not (decoder.training and losses.with_gradients):
            return
        if not any(parameter.requires_grad for indexer in indexers for parameter in indexer.parameters()):
            raise ValueError(
                f"mindspeed_dsa: apply_dsa() was given loss_coeff={losses.coefficient}, and no parameter of "
                "an indexer requires a gradient; let them (with PEFT name 'wq_b', 'wk' and 'weights_proj' in "
                "target_modules, or 'indexer' in modules_to_save), or take loss_coeff=0"
            )
        for indexer in indexers:
            # FSDP2 gathers the weights again in a backward hook on the output. The indexer's output is
            # integer indices without a graph, so keep its weights gathered after the forward.
            if isinstance(indexer, FSDPModule):
                indexer.set_reshard_after_forward(False, recurse=False)

    def _end(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        self._losses.collecting = False
        return self._connect(decoder, output)

    def _connect(self, module: nn.Module, output: Any) -> Any:
        """Connect the indexer losses to the first tensor in the model's output; see ``loss_graph.py``."""
        first, losses = connect(module, output[0], list(self._losses.found.values()))
        self._losses.found = dict(zip(self._losses.found, losses, strict=True))
        if isinstance(output, tuple):
            return (first, *output[1:])
        output[next(iter(output))] = first
        return output

    def _add_loss(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Add the indexer loss to the model's loss, as transformers' models do with their router losses."""
        loss = self.loss
        theirs = output[0] if isinstance(output, tuple) else output.loss
        # Hooks get the call's arguments, in which labels may be positional.
        labels = (dict(zip(self._parameters, args, strict=False)) | kwargs).get("labels")
        if loss is None or labels is None or theirs is None:
            return self._connect(model, output)
        share = self._losses.coefficient
        if (total := kwargs.get("num_items_in_batch")) is not None:
            # The model's loss is divided by the tokens of all microbatches, so weigh this loss by its share
            # of tokens. 1000 of 4000 tokens count: share 1/4. Language models shift their targets by one.
            from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

            if LOSS_MAPPING.get(getattr(model, "loss_type", "")) is ForCausalLMLoss:
                labels = labels[..., 1:]
            share = share * ((labels != -100).sum() / total).to(theirs.device)
        theirs = theirs + share * loss.to(theirs.device)
        if isinstance(output, tuple):
            return (theirs, *output[1:])
        output.loss = theirs
        return output


def _slot(indexer: nn.Module) -> str:
    """Return the name of the attribute to patch: ``forward``, or ``_old_forward`` if accelerate wraps it."""
    return "_old_forward" if "_old_forward" in vars(indexer) else "forward"
