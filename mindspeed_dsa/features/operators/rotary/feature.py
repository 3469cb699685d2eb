"""``--use-fused-rotary-pos-emb``: the function below every way in which Megatron rotates queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.operators.selection import FUSED_OPERATORS, check_selection, is_named, selects
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch


def take_the_place_of_megatrons(args: Any) -> Sequence[str]:
    """Switch off ``apply_rope_fusion``; ``Feature.rewrite``.

    It is true by default, so nobody has asked for it: nothing contradicts the flag that was given.
    """
    if not getattr(args, "apply_rope_fusion", False):
        return ()
    args.apply_rope_fusion = False
    return ("fused-rotary-pos-emb: apply_rope_fusion is False, ours takes the place of Megatron's",)


_SWITCH = "use_fused_rotary_pos_emb"
_ROTARY = ("rope", "yarn", "mrope")


def check_rotary(args: Any, options: Any) -> Iterator[str]:
    """What in a job's arguments does not go with a fused rotary embedding."""
    yield from check_selection(args, "rotary-pos-emb", _SWITCH)
    if not is_named(args, "rotary-pos-emb", _SWITCH) or argument(args, "multi_latent_attention"):
        return
    embedding = argument(args, "position_embedding_type") or "rope"
    if embedding not in _ROTARY:
        yield (
            f"a fused rotary embedding needs --position-embedding-type rope, and the model has {embedding}; "
            "set it, or drop rotary-pos-emb from the fused operators"
        )


FEATURE = Feature(
    name="fused-rotary-pos-emb",
    summary="Rotary position embedding is one operator forward and one backward, whose sines and cosines are "
    "computed once for all layers.",
    flags=(Flag("--use-fused-rotary-pos-emb", "Fuse rotary position embedding."), FUSED_OPERATORS),
    patches=(
        Patch(
            "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
            "wrap",
            "mindspeed_dsa.features.operators.rotary.embedding:rotate_fused",
            "every call computes sines and cosines anew and rotates in some fifteen operations",
            params=("t", "freqs", "rotary_interleaved", "mscale"),
            versions=releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=selects("rotary-pos-emb", "use_fused_rotary_pos_emb"),
    rewrite=take_the_place_of_megatrons,
    check=check_rotary,
    doc="fused-operators.md",
)
