"""The fields that DSA needs in Megatron's configuration, under the names of later releases.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mindspeed_dsa.megatron.dsa import SIZES


@dataclasses.dataclass
class DSAFields:
    """Names, types and defaults as in ``TransformerConfig`` of Megatron-core 0.16."""

    experimental_attention_variant: str | None = None
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_loss_coeff: float | None = None
    dsa_indexer_use_sparse_loss: bool = False


FIELDS = SimpleNamespace(**{field.name: field for field in dataclasses.fields(DSAFields)})
"""``dataclasses.Field`` objects by name; in a class's ``__dataclass_fields__`` they are found by code that
copies arguments to fields, replaces fields, or derives a dataclass."""


def accept_dsa_fields(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate a configuration's ``__init__``, which was generated without these fields."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for field in dataclasses.fields(DSAFields):
            setattr(self, field.name, kwargs.pop(field.name, field.default))
        original(self, *args, **kwargs)
        problems = problems_of(self)
        if problems:
            raise ValueError("mindspeed_dsa: dsa-backport: " + "; ".join(problems))

    return __init__


def problems_of(config: Any) -> list[str]:
    """Problems that prevent a DSA model with this configuration; each message includes a fix."""
    variant = getattr(config, "experimental_attention_variant", None)
    if variant is None:
        return []
    if variant != "dsa":
        return [f"experimental_attention_variant={variant!r} is not known to this Megatron; use 'dsa'"]
    problems = [
        f"DSA needs {name}; DeepSeek-V3.2 has {usual}"
        for name, usual in SIZES.items()
        if not getattr(config, name)
    ]
    if not config.multi_latent_attention:
        problems.append("DSA is built on latent attention; use MLATransformerConfig")
    elif config.dsa_indexer_head_dim and config.dsa_indexer_head_dim < config.qk_pos_emb_head_dim:
        problems.append(
            f"dsa_indexer_head_dim={config.dsa_indexer_head_dim} has no room for the "
            f"qk_pos_emb_head_dim={config.qk_pos_emb_head_dim} in it; make it larger"
        )
    if config.apply_rope_fusion:
        problems.append("DSA has no fused RoPE here; use apply_rope_fusion=False")
    return problems
