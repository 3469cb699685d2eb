"""Configurations of latent attention, and the angles of models made with them; runs in the pool's workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.matrix import model as any_release
from tests.support import model as tiny
from tests.support.model import error_of

FIELDS = ("original_max_position_embeddings", "beta_fast", "beta_slow")


def angles(switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Angles of the second position in a model's main attention and in its indexer, and the fields said."""
    tiny.start(switches)
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    # Before 0.13 local modules are a matter of the specification alone.
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    local = {"transformer_impl": "local"} if "transformer_impl" in known else {}
    cfg = any_release.config(rope_type="yarn", mscale=1.0, mscale_all_dim=1.0, **local, **overrides)
    attention = any_release.gpt_model(cfg).decoder.layers[0].self_attention
    found = {"fields": {name: getattr(cfg, name, None) for name in FIELDS}}
    for name, module in (("main", attention), ("indexer", attention.core_attention.indexer)):
        angle, _ = module.rotary_pos_emb(2)
        found[name] = angle[1].flatten().double()
    return found


def made(switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, made and copied."""
    tiny.start(switches)
    cfg = any_release.config(**{"rope_type": "yarn", **overrides})
    again = dataclasses.replace(cfg, layernorm_epsilon=1e-4)
    return {key: getattr(each, key, None) for each in (cfg, again) for key in FIELDS}


def refused(switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    """Message about a configuration that cannot be."""
    return error_of(f"{__name__}:made", switches=switches, overrides=overrides)
