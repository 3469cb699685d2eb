"""Megatron's own dense attention, ``DotProductAttention``, for packed documents and for latent attention.

Without Transformer Engine there is no other. Imports Megatron only when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.context_parallel.packs import Pack
from mindspeed_dsa.feature import Context
from mindspeed_dsa.ops.documents import attend_by_documents


def attend_to_own_document(original: Callable[..., Tensor], context: Context[Any]) -> Callable[..., Tensor]:
    """Decorate ``DotProductAttention.forward``, which refuses packs."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        # Context parallel ranks attend to documents together.
        if packed_seq_params is None or self.config.context_parallel_size > 1:
            return original(
                self,
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        _refuse(self, attn_mask_type, attention_bias)
        # [t, heads, dim]
        pack = Pack.of(packed_seq_params, key.size(0))
        softmax = self.scale_mask_softmax

        def attend(dropout: float) -> Tensor:
            return attend_by_documents(
                query.unsqueeze(1),
                key.unsqueeze(1),
                value.unsqueeze(1),
                pack.starts,
                pack.ends,
                # What --apply-query-key-layer-scaling divides by, the softmax multiplies by.
                self.softmax_scale * (softmax.scale or 1.0),
                dropout,
            )

        dropout = self.attention_dropout.p if self.training else 0.0
        if dropout and not self.config.sequence_parallel:
            with context.megatron("core.tensor_parallel").get_cuda_rng_tracker().fork():
                out = attend(dropout)
        else:
            out = attend(dropout)
        return out.flatten(1)

    return forward


def _refuse(attention: Any, attn_mask_type: Any, attention_bias: Tensor | None) -> None:
    kind = getattr(attn_mask_type or attention.attn_mask_type, "name", "")
    found = [] if kind in ("causal", "padding_causal") else [f"attn_mask_type {kind}"]
    if attention_bias is not None:
        found.append("attention_bias")
    if getattr(attention.scale_mask_softmax, "window_size", None) is not None:
        found.append("a sliding window")
    if getattr(attention.config, "softmax_type", "vanilla") != "vanilla":
        found.append(f"softmax_type {attention.config.softmax_type}")
    if found:
        raise ValueError(
            f"pack-documents: DotProductAttention got {', '.join(found)}; packed documents have plain causal "
            "attention without Transformer Engine. Omit that, or do not pack"
        )
