"""Parts of an attention layer of transformers on the operators: indexer, latent keys, attention.

The layers' own ``forward`` stays: projections, rotary embedding, cache and output projection are
transformers'. It calls the indexer, ``expand_kv`` and the attention that is registered as :data:`NAME`: those
three are here.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

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
"""Of the attention implementation, as ``model.config._attn_implementation`` has it."""
ATTRIBUTE = "_mindspeed_dsa"
"""Of attention layers and indexers: their :class:`Layer`."""


class Losses:
    """Indexer losses of a model's forward pass.

    Attributes:
        stage: see :data:`mindspeed_dsa.ops.dsa.Stage`.
        coefficient: of their sum in the model's loss; no loss is computed where it is 0.
        backend: see :data:`mindspeed_dsa.ops.dsa.BackendName`.
        found: by number of the layer, as they were computed, of the last forward pass.
        collecting: whether a forward pass is under way; layers that are computed again in backward, and
            their losses with them, belong to none.
        with_gradients: whether that pass was called with gradients.
        model: transformers', whose layers these are of.
    """

    def __init__(self, model: nn.Module, stage: Stage, coefficient: float, backend: str) -> None:
        self.model, self.stage, self.coefficient, self.backend = model, stage, coefficient, backend
        self.found: dict[int, Tensor] = {}
        self.collecting = self.with_gradients = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Losses:
        # A copy of a model, such as a reference model, has losses of its own; a copy of a layer has not.
        if id(self.model) not in memo:
            return self
        return Losses(copy.deepcopy(self.model, memo), self.stage, self.coefficient, self.backend)


@dataclass
class Layer(threading.local):
    """State of one attention layer, the indexer's part in it included; of a call, each thread has its own.

    Attributes:
        losses: of the model.
        topk: keys per row.
        rotate: transformers' rotary embedding of the indexer, of query and key.
        operands: of the indexer, from its call to that of the attention.
        scores: of the selected keys, likewise.
        absorbed: whether keys of this call stay latent.
        rows: of this call.
        loss: of the indexer, from the attention to the end of the decoder layer.
        below: input of the decoder layer, if losses of layers below are connected to it and it has no
            gradient of its own.
    """

    losses: Losses
    topk: int
    rotate: Any
    operands: IndexerOperands | None = None
    scores: Tensor | None = None
    absorbed: bool = False
    rows: int = 0
    loss: Tensor | None = None
    below: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        # PEFT trains a copy of an indexer, for the same layer. Between two calls nothing of one is in here.
        if id(self.losses.model) not in memo:
            return self
        return Layer(copy.deepcopy(self.losses, memo), self.topk, self.rotate)

    def trains(self, indexer: nn.Module) -> bool:
        """Return whether this call computes a loss; it has to be the same when the layer is recomputed."""
        wanted = self.losses.coefficient > 0 and indexer.training
        wanted = wanted and any(parameter.requires_grad for parameter in indexer.parameters())
        if wanted and self.losses.collecting and self.losses.with_gradients and not torch.is_grad_enabled():
            raise ValueError(
                "mindspeed_dsa: the indexer's loss has no gradient in a layer that is checkpointed "
                "reentrantly; call gradient_checkpointing_enable({'use_reentrant': False})"
            )
        return wanted and torch.is_grad_enabled()

    def is_dense(self, keys: int) -> bool:
        """Return whether rows attend to every key that they see."""
        return is_dense(self.losses.stage) or keys <= self.topk


def count_rows(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note how many rows a layer is called with: a hook before its ``forward``.

    Raises:
        ValueError: another attention has been set since :func:`apply_dsa`.
    """
    asked = attention.config._attn_implementation
    if asked != NAME:
        raise ValueError(
            f"mindspeed_dsa: attention {asked!r} was set on a model that apply_dsa() had put on {NAME!r}; "
            f"call undo() of what apply_dsa() returned first, or set_attn_implementation({NAME!r}) to go back"
        )
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    getattr(attention, ATTRIBUTE).rows = hidden.shape[1]


def select_keys(
    self: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Select keys, in the place of the ``forward`` of transformers' indexers.

    Args:
        self: the indexer.
        hidden_states: ``[batch, rows, hidden_size]``.
        q_resid: ``[batch, rows, q_lora_rank]``.
        position_embeddings: cosines and sines.
        attention_mask: ``[batch, rows, width]``, the layer's mask: see :func:`rows_of`.
        *args: position ids, not used by transformers either.
        **kwargs: among them the cache.

    Returns:
        ``[batch, rows, topk]`` int32, -1 at the tail; of width 0 where rows attend to all keys that they see.
    """
    layer: Layer = getattr(self, ATTRIBUTE)
    trains = layer.trains(self)
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the latter until transformers 5.22
    with torch.set_grad_enabled(trains):
        operands = project(self, layer, hidden_states.detach(), q_resid.detach(), position_embeddings)
    if cache is not None:
        operands = operands._replace(key=cache.update_indexer(operands.key, self.layer_idx))
    layer.operands = operands if trains else None
    keys = operands.key.shape[1]
    if layer.is_dense(keys):
        return torch.empty(*hidden_states.shape[:2], 0, dtype=torch.int32, device=hidden_states.device)
    rows = rows_of(attention_mask[:, None].expand(len(hidden_states), -1, -1, -1))
    with torch.set_grad_enabled(trains):
        found = lightning_indexer(
            *operands,
            layer.topk,
            starts=rows.starts,
            ends=rows.ends,
            form=rows.form,
            in_order=False,
            backend=layer.losses.backend,
        )
    layer.scores = found.topk_scores if trains else None
    return found.topk_indices


def project(
    indexer: Any, layer: Layer, hidden: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> IndexerOperands:
    """Project the indexer's operands by its own layers, as its ``forward`` does."""
    query = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    rope = indexer.qk_rope_head_dim
    query_rope, key_rope = layer.rotate(
        query[..., :rope], key[..., :rope], *position_embeddings, unsqueeze_dim=2
    )
    query = torch.cat([query_rope, query[..., rope:]], dim=-1)
    key = torch.cat([key_rope, key[..., rope:]], dim=-1).squeeze(2)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    query, key = _of_one_dtype(query, key)
    return IndexerOperands(query, key, weights * indexer.n_heads**-0.5 * indexer.softmax_scale)


def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Keep keys latent where attention is faster so, in the place of ``expand_kv`` of transformers' layers.

    Args:
        self: the attention layer.
        kv_nope: ``[batch, 1, keys, kv_lora_rank]``.
        k_rot: ``[batch, 1, keys, qk_rope_head_dim]``.

    Returns:
        Keys and values, ``[batch, heads, keys, dim]`` each; or ``[batch, 1, keys, latent + rope]`` twice.
    """
    layer: Layer = getattr(self, ATTRIBUTE)
    keys = kv_nope.shape[2]
    widths = self.qk_head_dim + self.v_head_dim, 2 * self.kv_lora_rank + self.qk_rope_head_dim
    if not _is_plain(self.kv_b_proj):
        layer.absorbed = False
    elif layer.rows < keys:
        # Behind a cache, few rows are absorbed rather than all keys expanded.
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
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to selected keys: the function that is registered with ``transformers.AttentionInterface``.

    Args:
        module: the attention layer.
        query: ``[batch, heads, rows, dim]``.
        key: as :func:`expand_kv` returned it, and so is the next one.
        value: likewise.
        attention_mask: see :func:`rows_of`.
        scaling: of scores.
        dropout: of probabilities; there is none.
        indices: as :func:`select_keys` returned them, of this layer or the one whose selection it shares.
        **kwargs: what other implementations take.

    Returns:
        ``[batch, rows, heads, value_dim]``, and no probabilities.

    Raises:
        ValueError: the layer is of no model in use, or was given a dropout.
    """
    layer: Layer | None = getattr(module, ATTRIBUTE, None)
    if layer is None or indices is None:
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
    layer.operands = layer.scores = None
    loss_wanted = operands is not None
    rows = rows_of(attention_mask.expand(len(query), -1, -1, -1))
    query, key, value = _of_one_dtype(query, key, value)
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    up_value = None
    if layer.absorbed:
        # [heads, nope + value_dim, latent]
        up = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank).to(query.dtype)
        up_key, up_value = up.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
        nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        query = torch.cat([torch.einsum("bshd,hdc->bshc", nope, up_key), rope], dim=-1)
        key = key.squeeze(2)
    result = deepseek_sparse_attention(
        query,
        key,
        None if layer.absorbed else value.transpose(1, 2),
        *(operands if operands is not None else (None, None, None)),
        topk=layer.topk,
        softmax_scale=scaling,
        value_dim=module.kv_lora_rank if layer.absorbed else None,
        stage=layer.losses.stage,
        with_loss=loss_wanted,
        selected=IndexerOutput(indices, cast(Tensor, scores)) if indices.shape[-1] else None,
        starts=rows.starts,
        ends=rows.ends,
        form=rows.form,
        row_mask=rows.row_mask if loss_wanted else None,
        backend=layer.losses.backend,
    )
    layer.loss = result.loss if layer.losses.collecting else None
    out = result.out
    if up_value is not None:
        out = torch.einsum("bshc,hvc->bshv", out, up_value)
    return out, None


def _of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in autocast's dtype inside of it, as transformers' products have them."""
    kind = tensors[0].device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return tuple(tensor.to(dtype) for tensor in tensors)
    return tensors


def _is_plain(linear: Any) -> bool:
    """Return whether a projection is its weight and nothing else: no adapter, no quantisation, no hook."""
    if type(linear) is not nn.Linear:
        return False
    weight: Any = linear.weight
    bias: Any = linear.bias
    forward = linear._forward_pre_hooks, linear._forward_hooks
    backward = linear._backward_pre_hooks, linear._backward_hooks
    # Whoever replaces the forward of one module, as accelerate's hooks and some adapters do.
    hooked = any(forward) or any(backward) or "forward" in vars(linear)
    # A DTensor is another type, and one on the meta device is brought by a hook.
    return type(weight) is nn.Parameter and bias is None and weight.device.type != "meta" and not hooked
