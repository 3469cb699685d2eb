"""Sizes of released models with DSA, as far as what attends, selects and is measured depends on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mindspeed_dsa.megatron.selections import Sharing

LATENT, ROPE, INDEX_DIM = 512, 64, 128
"""Sizes that all of them have: of the latent key-value, of rotary parts, of an index head."""


@dataclass(frozen=True)
class Released:
    """One layer's sizes, and the layers that select.

    Attributes:
        nope: dimensions of a head without position.
        value: dimensions of a head's value.
        query_rank: dimensions of the latent query.
    """

    heads: int
    index_heads: int
    nope: int
    value: int
    hidden: int
    query_rank: int
    topk: int = 2048
    sharing: Sharing = field(default_factory=Sharing)


_GLM_5 = Released(heads=64, index_heads=32, nope=192, value=256, hidden=6144, query_rank=2048)
MODELS = {
    "deepseek-v3.2": Released(heads=128, index_heads=64, nope=128, value=128, hidden=7168, query_rank=1536),
    "glm-5": _GLM_5,
    "glm-5.2": replace(_GLM_5, sharing=Sharing(frequency=4, offset=3)),
}
