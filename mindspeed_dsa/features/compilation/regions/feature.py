"""``--compile-regions``: ``torch.compile`` for parts of a layer with many small operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.patches.spec import Patch


def check_regions(args: Any, options: Any) -> Iterator[str]:
    """Yield problems with arguments that do not work together with compiled regions."""
    if argument(args, "multi_latent_attention") is False:
        yield "--compile-regions compiles latent attention, which this model lacks; omit it"
    yield from refuse_graphs(
        args, "--compile-regions", "it compiles at the first steps, which no graph captures"
    )


_IMPL = "mindspeed_dsa.features.compilation.regions"
_MLA = "megatron.core.transformer.multi_latent_attention:MLASelfAttention"
_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla:AbsorbedMLASelfAttention"
_RELEASES = ">=0.16,<0.21"
_INNERMOST = -200
"""Priority below all other wrappers, so that they stay outside of the compiled graphs."""

FEATURE = Feature(
    name="compile-regions",
    summary="Compiles two regions of a layer, one graph each: what precedes latent attention, and what "
    "follows it.",
    flags=(
        Flag(
            "--compile-regions",
            "Compile latent attention's prolog and epilog with torch.compile, each as one graph; attention "
            "itself and all communication stay as they are.",
        ),
    ),
    patches=(
        Patch(
            f"{_MLA}.__init__",
            "wrap",
            f"{_IMPL}.prolog:offer_to_attention",
            "latent attention in absorbed form asks its layer for compiled steps",
            versions=">=0.16,<0.19",  # later ones have a class for it
            priority=_INNERMOST,
        ),
        Patch(
            f"{_MLA}.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.prolog:compile_prolog",
            "compiles the forty operators between the hidden states and query, key and value as one graph",
            params=("hidden_states", "packed_seq_params", "inference_context"),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            f"{_ABSORBED}.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.prolog:compile_absorbed_prolog",
            "compiles what lies between the hidden states and query and key in absorbed form as one graph",
            params=("hidden_states", "packed_seq_params", "inference_context"),
            versions=">=0.19,<0.21",
            priority=_INNERMOST,
        ),
    ),
    requires=Requires(versions={"megatron-core": _RELEASES, "torch": ">=2.13"}),
    check=check_regions,
    doc="compile-regions.md",
)
