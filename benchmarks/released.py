"""Sizes of released models with DSA that attention, selection and measurements depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.tools.planner.configs import KNOWN

LATENT, ROPE, INDEX_DIM = 512, 64, 128
"""Widths that all of them share: latent key-value, rotary parts, an index head."""


@dataclass(frozen=True)
class Released:
    """One layer's sizes, and the pattern of selecting layers.

    Attributes:
        nope: width of a head's part without position.
        value: width of a head's value.
        query_rank: width of the latent query.
    """

    heads: int
    index_heads: int
    nope: int
    value: int
    hidden: int
    query_rank: int
    topk: int = 2048
    sharing: Sharing = field(default_factory=Sharing)


def _released(name: str) -> Released:
    """Return the sizes of a configuration that plans know."""
    config = KNOWN[name]
    return Released(
        heads=config["num_attention_heads"],
        index_heads=config["index_n_heads"],
        nope=config["qk_nope_head_dim"],
        value=config["v_head_dim"],
        hidden=config["hidden_size"],
        query_rank=config["q_lora_rank"],
        topk=config["index_topk"],
        sharing=Sharing(config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 0)),
    )


MODELS = {name: _released(name) for name in ("deepseek-v3.2", "glm-5", "glm-5.2")}
