"""Replacements for parts of a transformers attention layer: indexer, ``expand_kv`` and attention function.

The layer's own ``forward`` is kept, with transformers' projections, rotary embedding and cache. It calls the
indexer, ``expand_kv`` and the attention function registered as :data:`NAME`, which are implemented here.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from mindspeed_dsa.integrations.transformers.families import Family
from mindspeed_dsa.integrations.transformers.masks import rows_of
from mindspeed_dsa.ops.dsa import (
    IndexerOperands,
    IndexerOutput,
    Stage,
    deepseek_sparse_attention,
    is_faster_by_head,
    lightning_indexer,
)
from mindspeed_dsa.ops.dsa.attention import is_dense

NAME = "mindspeed_dsa"
"""Name of the attention implementation in ``model.config._attn_implementation``."""
ATTRIBUTE = "_mindspeed_dsa"
"""Attribute of attention layers and indexers with their :class:`Layer`."""

LossLayers = Literal["own", "served", "served-sum"]
"""Layers whose attention an indexer learns from: its own layer, or all layers that use its selection.

``served`` is the mean over these layers, ``served-sum`` the sum.
"""


def groups_of(attentions: list[Any]) -> list[list[int]]:
    """Return the numbers of the layers that use each indexer's selection, the indexer's own layer first.

    Args:
        attentions: attention layers that attend to selected keys, in order.
    """
    groups: list[list[int]] = []
    for attention in attentions:
        if attention.indexer is not None or not groups:
            groups.append([])
        groups[-1].append(attention.layer_idx)
    return groups


def weights_of(groups: list[list[int]], loss_layers: LossLayers) -> dict[int, float]:
    """Return the weight of each layer's loss in the model's loss, by layer number."""
    mean = loss_layers == "served"
    return {number: 1 / len(group) if mean else 1.0 for group in groups for number in group}


class Shared:
    """Selection of a layer whose indexer trains, for the layers that reuse it.

    An object takes the place of the indices that a layer returns and transformers passes on. So each call
    of a layer holds its own selection: a recomputed layer gets the one of its forward pass, and the last
    graph that needs the selection frees it. It is no tuple, because FSDP2 would cast a tuple's fp32 scores to
    the dtype of its parameters.

    Attributes:
        indices: selected keys, result of :func:`select_keys` without sharing.
        values: scores of these keys, or the indexer's operands if tokens attend to all visible keys; with the
            indexer's graph.
    """

    def __init__(self, indices: Tensor, values: tuple[Tensor, ...]) -> None:
        self.indices, self.values = indices, values


class Losses:
    """Indexer losses of a model's forward pass.

    Attributes:
        stage: stage of training, see :data:`mindspeed_dsa.ops.dsa.Stage`.
        coefficient: factor of the losses' sum in the model's loss; with 0 no loss is computed.
        backend: backend of the operators, see :data:`mindspeed_dsa.ops.dsa.BackendName`.
        weights: weight of each layer's loss in the sum, by layer number.
        found: losses of the last forward pass, by layer number.
        collecting: whether a forward pass is running. Losses from recomputation in backward are not
            collected.
        with_gradients: whether the forward pass was called with gradients enabled.
        model: transformers model that the layers belong to.
    """

    def __init__(
        self, model: nn.Module, stage: Stage, coefficient: float, backend: str, weights: dict[int, float]
    ) -> None:
        self.model, self.stage, self.coefficient, self.backend = model, stage, coefficient, backend
        self.weights = weights
        self.found: dict[int, Tensor] = {}
        self.collecting = self.with_gradients = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Losses:
        # A copied model, such as a reference model, gets its own losses. A copied layer of this model shares
        # them.
        if id(self.model) not in memo:
            return self
        model = copy.deepcopy(self.model, memo)
        return Losses(model, self.stage, self.coefficient, self.backend, self.weights)


@dataclass
class Layer(threading.local):
    """State of one attention layer and its indexer, per thread.

    Attributes:
        losses: object that collects the losses of all layers of the model.
        family: row of the table of families.
        selects: whether tokens attend to selected keys, else to all visible ones.
        topk: largest number of keys that a token attends to, selected or in a window.
        is_served: whether other layers reuse the indexer's selection and train it.
        operands: indexer's operands; stored by the indexer, used by the attention of the same call.
        scores: scores of the selected keys; stored by the indexer, used by the attention of the same call.
        absorbed: whether keys stay latent in this call.
        rows: number of query tokens in this call.
        loss: indexer loss; stored by the attention, used at the end of the decoder layer.
        shared: selection for other layers; stored by the attention, used at the end of the decoder layer.
        below: decoder layer's input, if only the losses of lower layers are backpropagated through it, see
            ``loss_graph.py``; else ``None``.
    """

    losses: Losses
    family: Family
    selects: bool
    topk: int
    is_served: bool
    operands: IndexerOperands | None = None
    scores: Tensor | None = None
    absorbed: bool = False
    rows: int = 0
    loss: Tensor | None = None
    shared: Shared | None = None
    below: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        # PEFT trains a copy of an indexer for the same layer. Between calls there is no per-call state to
        # copy.
        if id(self.losses.model) not in memo:
            return self
        losses = copy.deepcopy(self.losses, memo)
        return Layer(losses, self.family, self.selects, self.topk, self.is_served)

    def trains(self, indexer: nn.Module) -> bool:
        """Return whether this call computes an indexer loss. The answer is the same under recomputation."""
        wanted = self.losses.coefficient > 0 and indexer.training
        wanted = wanted and any(parameter.requires_grad for parameter in indexer.parameters())
        # A reentrant checkpoint runs the first forward with gradients disabled.
        if wanted and self.losses.collecting and self.losses.with_gradients and not torch.is_grad_enabled():
            raise ValueError(
                "mindspeed_dsa: the indexer's loss has no gradient in a layer that is checkpointed "
                "reentrantly; call gradient_checkpointing_enable({'use_reentrant': False})"
            )
        return wanted and torch.is_grad_enabled()

    def is_dense(self, keys: int) -> bool:
        """Return whether tokens attend to all of ``keys`` keys that precede them."""
        return (self.selects and is_dense(self.losses.stage)) or keys <= self.topk


def count_rows(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: store the number of query tokens in this call of the attention layer.

    Raises:
        ValueError: another attention implementation has been set since :func:`apply_dsa`.
    """
    asked = attention.config._attn_implementation
    if asked != NAME:
        raise ValueError(
            f"mindspeed_dsa: attention {asked!r} was set on a model that apply_dsa() had put on {NAME!r}; "
            f"call undo() of what apply_dsa() returned first, or set_attn_implementation({NAME!r}) to go back"
        )
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    getattr(attention, ATTRIBUTE).rows = hidden.shape[1]


def select_keys(self: Any, *args: Any, **kwargs: Any) -> Tensor | Shared:
    """Select keys. Replaces ``forward`` of transformers' indexers.

    Args:
        self: indexer.
        *args: arguments named by :attr:`Family.arguments`: hidden states ``[batch, rows, hidden_size]``, the
            attention's latent queries ``[batch, rows, q_lora_rank]`` if the indexer takes them, cosines and
            sines, the layer's mask ``[batch, rows, width]`` (see :func:`rows_of`), and positions.
        **kwargs: the same by name, and the cache.

    Returns:
        ``[batch, rows, topk]`` int32 with -1 at the end; ``topk`` is 0 if tokens attend to all visible keys.
            As :class:`Shared` if other layers train this indexer, too.
    """
    layer: Layer = getattr(self, ATTRIBUTE)
    inputs = dict(zip(layer.family.arguments, args, strict=False)) | kwargs
    hidden: Tensor = inputs["hidden_states"]
    trains = layer.trains(self)
    cache = inputs.get("cache", inputs.get("past_key_values"))  # renamed to "cache" after transformers 5.22
    with torch.set_grad_enabled(trains):
        operands = project(self, layer.family, inputs)
    if cache is not None:
        operands = operands._replace(key=cache.update_indexer(operands.key, self.layer_idx))
    layer.operands = operands if trains else None
    keys = operands.key.shape[1]
    if layer.is_dense(keys):
        none = torch.empty(*hidden.shape[:2], 0, dtype=torch.int32, device=hidden.device)
        return Shared(none, operands) if trains and layer.is_served else none
    rows = rows_of(inputs["attention_mask"][:, None].expand(len(hidden), -1, -1, -1))
    with torch.set_grad_enabled(trains):
        selection = lightning_indexer(
            *operands,
            layer.topk,
            starts=rows.starts,
            ends=rows.ends,
            form=rows.form,
            in_order=False,
            backend=layer.losses.backend,
        )
    layer.scores = selection.topk_scores if trains else None
    if trains and layer.is_served:
        return Shared(selection.topk_indices, (selection.topk_scores,))
    return selection.topk_indices


def project(indexer: Any, family: Family, inputs: dict[str, Any]) -> IndexerOperands:
    """Compute the indexer's queries, keys and weights as transformers' indexer does, from detached inputs.

    Args:
        indexer: transformers' indexer.
        family: row of the table of families.
        inputs: arguments of the indexer by name.
    """
    hidden: Tensor = inputs["hidden_states"].detach()
    latent: Tensor | None = inputs.get("q_resid")
    latent = None if latent is None else latent.detach()
    # The angles may have trained parameters, too.
    angles = tuple(x.detach() for x in inputs["position_embeddings"])
    query = family.query(indexer, hidden, latent, inputs.get("position_ids"))
    query, key = family.rotated(indexer, query, family.key(indexer, hidden), angles)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    query, key = _of_one_dtype(query, key)
    return IndexerOperands(query, key, weights * indexer.n_heads**-0.5 * indexer.softmax_scale)


def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Expand keys and values per head, or keep them latent if attention is faster so. Replaces ``expand_kv``.

    Args:
        self: attention layer.
        kv_nope: ``[batch, 1, keys, kv_lora_rank]``.
        k_rot: ``[batch, 1, keys, qk_rope_head_dim]``.

    Returns:
        Keys and values, ``[batch, heads, keys, dim]`` each, or the same latent ``[batch, 1, keys, latent +
            rope]`` for both.
    """
    layer: Layer = getattr(self, ATTRIBUTE)
    keys = kv_nope.shape[2]
    # DeepSeek-V3.2: 192 + 128 = 320 by head, 2 x 512 + 64 = 1088 absorbed.
    widths = self.qk_head_dim + self.v_head_dim, 2 * self.kv_lora_rank + self.qk_rope_head_dim
    if not _is_plain(self.kv_b_proj):
        layer.absorbed = False
    elif layer.rows < keys:
        # With a cache, absorbing the few new queries is cheaper than expanding all cached keys.
        layer.absorbed = True
    else:
        device, backend = kv_nope.device, layer.losses.backend
        by_head = is_faster_by_head(device, keys, layer.topk, self.num_heads, widths, backend)
        layer.absorbed = not (layer.is_dense(keys) or by_head)
    if not layer.absorbed:
        return cast("tuple[Tensor, Tensor]", type(self).expand_kv(self, kv_nope, k_rot))
    latent = torch.cat(_of_one_dtype(kv_nope, k_rot), dim=-1)
    return latent, latent


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    indices: Tensor | Shared | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to selected keys, or to all visible ones in a layer that selects none.

    Registered with ``transformers.AttentionInterface``.

    Args:
        module: attention layer.
        query: ``[batch, heads, rows, dim]``.
        key: first result of :func:`expand_kv`.
        value: second result of :func:`expand_kv`.
        attention_mask: mask, see :func:`rows_of`.
        scaling: softmax scale.
        dropout: dropout of probabilities; must be 0.
        indices: result of :func:`select_keys`, of this layer or of the layer whose selection it shares.
        s_aux: ``[heads]`` logits in the denominator of the softmax (sinks), or ``None``.
        **kwargs: arguments of other implementations.

    Returns:
        Output ``[batch, rows, heads, value_dim]``, and ``None`` for the probabilities.

    Raises:
        ValueError: the layer's model was not converted by ``apply_dsa``, or dropout is set.
    """
    layer: Layer | None = getattr(module, ATTRIBUTE, None)
    if layer is None or (layer.selects and indices is None):
        raise ValueError(
            f"attention {NAME!r} is for models that mindspeed_dsa.integrations.transformers.apply_dsa() was "
            f"called with, and {type(module).__name__} is not of one; call it, or load with "
            "attn_implementation='sdpa'"
        )
    if dropout:
        raise ValueError(
            f"mindspeed_dsa: attention_dropout of layer {module.layer_idx} has been set to {dropout} since "
            "apply_dsa(), and the operators have no dropout; set it to 0.0"
        )
    operands, scores = layer.operands, layer.scores
    # Each call's operands are used once.
    layer.operands = layer.scores = None
    loss_wanted = operands is not None or isinstance(indices, Shared)
    if isinstance(indices, Shared):
        shared, indices = indices, indices.indices.to(query.device)
        if operands is not None:
            layer.shared = shared if layer.losses.collecting else None
        else:
            values = [value.to(query.device) for value in shared.values]
            if indices.shape[-1]:
                (scores,) = values
            else:
                operands = IndexerOperands(*values)
    rows = rows_of(attention_mask.expand(len(query), -1, -1, -1))
    query, key, value = _of_one_dtype(query, key, value)
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    up_value = None
    if layer.absorbed:
        # [heads, nope + value_dim, latent]
        up = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank).to(query.dtype)
        up_key, up_value = up.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
        nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        # Move the key's up-projection to the query: q (U c) = (q U) c.
        query = torch.cat([torch.einsum("bshd,hdc->bshc", nope, up_key), rope], dim=-1)
        key = key.squeeze(2)
    selected = None
    if indices is not None and indices.shape[-1]:
        selected = IndexerOutput(indices, cast(Tensor, scores))
    result = deepseek_sparse_attention(
        query,
        key,
        None if layer.absorbed else value.transpose(1, 2),
        *(operands if operands is not None else (None, None, None)),
        topk=layer.topk,
        softmax_scale=scaling,
        value_dim=module.kv_lora_rank if layer.absorbed else None,
        sink=s_aux,
        # The stage "warmup" without a loss is attention to all visible keys.
        stage=layer.losses.stage if layer.selects else "warmup",
        with_loss=loss_wanted,
        selected=selected,
        starts=rows.starts,
        ends=rows.ends,
        form=rows.form,
        row_mask=rows.row_mask if loss_wanted else None,
        backend=layer.losses.backend,
    )
    layer.loss = result.loss if layer.losses.collecting else None
    out = result.out
    if up_value is not None:
        # The output is a mixture of latents. Project it to each head's values.
        out = torch.einsum("bshc,hvc->bshv", out, up_value)
    return out, None


def _of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to autocast's dtype if autocast is enabled, as autocast does for inputs of matmuls."""
    kind = tensors[0].device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return tuple(tensor.to(dtype) for tensor in tensors)
    return tensors


def _is_plain(linear: Any) -> bool:
    """Return whether a projection has only a weight: no adapter, no quantisation, no hook."""
    if type(linear) is not nn.Linear:
        return False
    weight: Any = linear.weight
    bias: Any = linear.bias
    forward = linear._forward_pre_hooks, linear._forward_hooks
    backward = linear._backward_pre_hooks, linear._backward_hooks
    # accelerate's hooks and some adapters replace the forward of one instance.
    hooked = any(forward) or any(backward) or "forward" in vars(linear)
    # A DTensor has another type, and a hook loads weights of a module on the meta device.
    return type(weight) is nn.Parameter and bias is None and weight.device.type != "meta" and not hooked
