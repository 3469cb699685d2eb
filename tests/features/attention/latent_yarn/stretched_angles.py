"""Worker functions: latent attention configurations with YaRN, and the rotary angles of their models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.matrix import model as any_release
from tests.support import model as tiny
from tests.support.model import error_of

FIELDS = ("original_max_position_embeddings", "beta_fast", "beta_slow")


def angles(switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the angles of position 1 in the main attention and in the indexer, and the config's fields."""
    tiny.start(switches)
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    # Before 0.13 the config has no transformer_impl; the layer spec decides.
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    local = {"transformer_impl": "local"} if "transformer_impl" in fields else {}
    cfg = any_release.config(rope_type="yarn", mscale=1.0, mscale_all_dim=1.0, **local, **overrides)
    attention = any_release.gpt_model(cfg).decoder.layers[0].self_attention
    result = {"fields": {name: getattr(cfg, name, None) for name in FIELDS}}
    for name, module in (("main", attention), ("indexer", attention.core_attention.indexer)):
        angle, _ = module.rotary_pos_emb(2)
        result[name] = angle[1].flatten().double()
    return result


def made(switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config and of its copy by ``dataclasses.replace``."""
    tiny.start(switches)
    cfg = any_release.config(**{"rope_type": "yarn", **overrides})
    again = dataclasses.replace(cfg, layernorm_epsilon=1e-4)

    @dataclasses.dataclass
    class Derived(type(cfg)):  # type: ignore[misc]
        """Configuration with a constructor of its own, as model providers have."""

        beta_fast: float = 24.0

    fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg) if field.init}
    derived = Derived(**{key: value for key, value in fields.items() if key not in FIELDS})
    made = [{key: getattr(each, key, None) for key in FIELDS} for each in (cfg, again, derived)]
    assert made[0] == made[1] == made[2]
    return made[0]


def refused(switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    """Return the error message of an invalid config."""
    return error_of(f"{__name__}:made", switches=switches, overrides=overrides)
