"""Recomputed layers that share a selection of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Context, Feature
from mindspeed_dsa.megatron.configuration import argument, require
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.shared_selections"

_AHEAD = ("recompute_in_advance", "recompute_in_bubble")


def uses_dsa(settings: Any) -> bool:
    """Activation rule: where the model uses DSA, and there is no switch."""
    return getattr(settings, "experimental_attention_variant", None) == "dsa"


def check_recompute(args: Any, options: None = None) -> Iterator[str]:
    """Refuse whatever runs the attention of layers again, in arguments or in a model's configuration."""
    frequency = argument(args, "dsa_indexer_topk_freq") or 1
    granularity, modules = argument(args, "recompute_granularity"), argument(args, "recompute_modules")
    # Without a list of modules Megatron recomputes the core attention.
    again = granularity == "full" or (granularity == "selective" and (not modules or "core_attn" in modules))
    if frequency <= 1 or not again:
        return
    found = ["--recompute-granularity full" if granularity == "full" else "--recompute-modules core_attn"]
    found += ["--" + name.replace("_", "-") for name in _AHEAD if argument(args, name)]
    yield (
        f"--dsa-indexer-topk-freq {frequency} cannot be used with {' and '.join(found)}: a layer that shares "
        "another one's selection of keys is recomputed before that one, and Megatron keeps one selection, "
        "by then that of a later microbatch or of a layer of multi-token prediction: gradients would be "
        "wrong, and nothing would say so. Recompute other parts, with --recompute-granularity selective and "
        "--recompute-modules without core_attn, or let every layer select (--dsa-indexer-topk-freq 1)"
    )


def refuse_recompute(original: Callable[..., None], context: Context[None]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if uses_dsa(self):
            require(context, check_recompute, self)
        original(self, *args, **kwargs)

    return __post_init__


FEATURE = Feature(
    name="dsa-shared-selections",
    summary="Refuses recomputation of layers that share a selection of keys, whose gradients would be wrong.",
    flags=(EXPERIMENTAL_ATTENTION_VARIANT,),
    patches=(
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "wrap",
            f"{_HERE}.feature:refuse_recompute",
            "a recomputed layer reads a selection that is not its microbatch's, and nothing says so",
            versions=">=0.19,<0.21",
        ),
    ),
    active=uses_dsa,
    check=check_recompute,
    doc="dsa-shared-selections.md",
)
