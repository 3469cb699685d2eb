"""When ``--use-flash-attn`` is ours to serve, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.features.attention.dense_context_parallel import options as dense_context_parallel
from mindspeed_dsa.integration.configuration import argument

_OURS = "--use-flash-attn without Transformer Engine"


def wanted(settings: Any) -> bool:
    """Whether the flag is on, and no other feature attends for it.

    Context parallel ranks and latent attention without Transformer Engine attend by the same operator in any
    case (``dense-context-parallel``), and sparse attention has operators of its own.
    """
    return bool(
        getattr(settings, "use_flash_attn", False)
        and getattr(settings, "transformer_impl", None) == "local"
        and getattr(settings, "experimental_attention_variant", None) != "dsa"
        and not dense_context_parallel.wanted(settings)
    )


def check_flash_attention(args: Any) -> Sequence[str]:
    """Report invalid combinations; absent arguments are not checked."""
    problems = []
    if argument(args, "attention_dropout"):
        problems.append(
            f"--attention-dropout: {_OURS} drops nothing; use --attention-dropout 0, or omit the flag"
        )
    if argument(args, "reset_attention_mask"):
        problems.append(
            f"--reset-attention-mask: {_OURS} is causal over the whole sequence; omit it for "
            "--pack-documents, or omit the flag"
        )
    return problems
