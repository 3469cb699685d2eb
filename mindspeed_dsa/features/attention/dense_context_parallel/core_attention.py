"""Megatron's dense attention, whose keys lie on several ranks.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.carried import Carried, FromLatents
from mindspeed_dsa.context_parallel.dense import DenseAttention
from mindspeed_dsa.context_parallel.packs import DealtBlocks, PackRows
from mindspeed_dsa.context_parallel.ring import CarryingStrategy, PackedRows, ring_attention
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy, Exchanged
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.attention.dense_context_parallel.feature import NO_DEAL, Options
from mindspeed_dsa.features.attention.dense_context_parallel.groups import make_strategy
from mindspeed_dsa.patches.errors import SettingsError

_WHO = "dense-context-parallel"
_SIZES_OF_LATENT_ATTENTION = ("k_channels", "v_channels")


@dataclass(frozen=True)
class Plan:
    """How one layer attends.

    Attributes:
        inner: attention on this rank.
        strategy: of the layer; ``None`` on a single rank.
    """

    inner: DenseAttention
    strategy: ContextParallelStrategy | None

    @property
    def carries(self) -> bool:
        """Whether keys and values may be made where they are needed."""
        return self.strategy is None or isinstance(self.strategy, CarryingStrategy)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention; arguments as Megatron's, sequence first."""
        if self.strategy is not None:
            return self.strategy.attend(self.inner, query, key, value)
        positions = None
        if key.size(0) != query.size(0):  # keys of a cache come first
            positions = torch.arange(key.size(0) - query.size(0), key.size(0))
        return self.inner(Exchanged(query, key, value, positions))

    def attend_to_latents(self, query: Tensor, carried: Carried) -> Tensor:
        """The same where latents stand for keys and values."""
        if self.strategy is None:
            return ring_attention(self.inner, query, carried, None)
        assert isinstance(self.strategy, CarryingStrategy)
        return self.strategy.attend_carried(self.inner, query, carried)

    def attend_to_documents(self, query: Tensor, carried: Carried, packed_seq_params: Any) -> Tensor:
        """The same of packed documents, on several ranks.

        Raises:
            ValueError: the layer's strategy, or its rotary embedding, knows whole sequences only.
        """
        if not isinstance(self.strategy, CarryingStrategy):
            raise ValueError(
                f"{_WHO}: {type(self.strategy).__name__} takes whole sequences, and a batch came with packed "
                "ones; use megatron_cp_algo, ulysses_cp_algo or hybrid_cp_algo"
            )
        rows = PackRows.of(packed_seq_params, query.size(0), self.strategy.group)
        assert rows.layout is not None
        if isinstance(rows.layout, DealtBlocks) and not isinstance(carried.expansion, FromLatents):
            raise ValueError(f"{_WHO}: {NO_DEAL}")
        return self.strategy.attend_carried(self.inner, query, carried, PackedRows(rows.pack, rows.layout))


def plan_of(core_attention: Any) -> Plan | None:
    """What :func:`build_for_context_parallel` has decided for a layer; ``None``: Megatron's own attention."""
    return getattr(core_attention, "dense_context_parallel_plan", None)


def build_for_context_parallel(
    original: Callable[..., None], context: Context[Options]
) -> Callable[..., None]:
    """Decorate ``DotProductAttention.__init__``."""
    accepted = inspect.signature(original).parameters

    def __init__(
        self: Any,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        extra = [name for name in _SIZES_OF_LATENT_ATTENTION if name in kwargs and name not in accepted]
        for name in extra:
            del kwargs[name]
        ranks = config.context_parallel_size
        config.context_parallel_size = 1
        try:
            original(self, config, layer_number, attn_mask_type, attention_type, *args, **kwargs)
        finally:
            config.context_parallel_size = ranks
        if ranks == 1 and not extra:
            return
        problem = unsupported_attention(self, attention_type)
        if problem is not None:
            raise SettingsError(f"{_WHO}: {problem}")
        strategy = None
        if ranks > 1:
            given = kwargs.get("cp_comm_type")
            strategy = make_strategy(self, layer_number, given, context)
        self.dense_context_parallel_plan = Plan(DenseAttention(scale_of(self)), strategy)

    return __init__


def scale_of(attention: Any) -> float:
    """Return the factor of scores; a ``DotProductAttention``'s softmax takes back what scaled by layer."""
    return float(attention.softmax_scale * (attention.scale_mask_softmax.scale or 1.0))


def unsupported_attention(attention: Any, attention_type: str) -> str | None:
    """Why the operator cannot attend for a ``DotProductAttention``, or None.

    Its configuration may ask for what is in no argument namespace.
    """
    if attention_type != "self" or attention.attn_mask_type.name != "causal":
        kind = f"{attention_type} attention with the mask type {attention.attn_mask_type.name}"
        return f"{kind} is not causal self attention, the only one that this feature has"
    if attention.attention_dropout.p > 0:
        return "attention_dropout is not supported; set it to 0"
    if getattr(attention.scale_mask_softmax, "window_size", None) is not None:
        return "window_size is not supported; every row sees all earlier keys"
    if getattr(attention, "softmax_offset", None) is not None:
        return "softmax_type is not supported; use 'vanilla'"
    return None


def attend_with_other_ranks(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``DotProductAttention.forward``."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        plan = plan_of(self)
        # On one rank packs are another feature's affair.
        if plan is None or (plan.strategy is None and packed_seq_params is not None):
            return original(
                self,
                query,
                key,
                value,
                attention_mask,
                attn_mask_type,
                attention_bias,
                packed_seq_params,
                **kwargs,
            )
        _require_plain(context.feature, attention_mask, attention_bias)
        latents = None
        # Latent attention hands over the weight of its up-projection for values: see latents.py.
        if value.dim() == 2:
            config = self.config
            expansion = FromLatents(query.size(2), config.kv_lora_rank, config.qk_head_dim)
            latents = Carried(key, expansion, (value,))
        elif query.dim() == 3:  # packed, without a batch
            query, key, value = (states.unsqueeze(1) for states in (query, key, value))
        if plan.strategy is not None and key.size(0) != query.size(0):
            raise ValueError(
                f"{_WHO}: {query.size(0)} queries came with {key.size(0)} keys, as in generation with a "
                "key-value cache; context parallel ranks share whole sequences, generate with "
                "--context-parallel-size 1"
            )
        if packed_seq_params is not None:
            out = plan.attend_to_documents(query, latents or Carried.of(key, value), packed_seq_params)
        elif latents is not None:
            out = plan.attend_to_latents(query, latents)
        else:
            out = plan.attend(query, key, value)
        return out.flatten(2)

    return forward


def _require_plain(who: str, mask: Tensor | None, bias: Tensor | None) -> None:
    found = {
        "an attention mask": (mask, "pass None, or add --no-create-attention-mask-in-dataloader"),
        "an attention bias": (bias, "pass None"),
    }
    for what, (given, instead) in found.items():
        if given is not None:
            raise ValueError(f"{who}: {what} came with a batch, and attention here is causal; {instead}")


def build_for_the_operator(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``DotProductAttention.__init__``.

    A layer of another kind, such as cross attention, keeps Megatron's, which is said once.
    """

    def __init__(
        self: Any,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(self, config, layer_number, attn_mask_type, attention_type, *args, **kwargs)
        problem = unsupported_attention(self, attention_type)
        if problem is not None:
            context.log.warning("a layer keeps Megatron's attention, with all scores: %s", problem, once=True)
            return
        self.dense_context_parallel_plan = Plan(DenseAttention(scale_of(self)), None)

    return __init__
