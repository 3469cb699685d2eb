"""``torch.compile`` for the parts of a layer that consist of many small operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch


def check_regions(args: Any, options: Any) -> Iterator[str]:
    """Yield what in a job's arguments takes layers as a whole in another way."""
    if argument(args, "cuda_graph_impl") not in (None, "none") or argument(args, "enable_cuda_graph"):
        yield (
            "--compile-regions compiles at the first steps, which a CUDA graph cannot record; omit "
            "--cuda-graph-impl, or --compile-regions"
        )


_IMPL = "mindspeed_dsa.features.compilation.regions"
_MLA = "megatron.core.transformer.multi_latent_attention:MLASelfAttention"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_ROUTING = "megatron.core.transformer.moe.moe_utils"
_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla:AbsorbedMLASelfAttention"
_RELEASES = ">=0.16,<0.21"
_INNERMOST = -200
"""Inside of all other wrappers: what they add to a function is not compiled."""

FEATURE = Feature(
    name="compile-regions",
    summary="Compiles four regions of a layer, one graph each: what precedes latent attention, what follows "
    "it, the router, and the shared expert.",
    flags=(
        Flag(
            "--compile-regions",
            "Compile latent attention's prolog and epilog, the router and the shared expert with "
            "torch.compile, each as one graph; attention itself and all communication stay as they are.",
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
        Patch(
            f"{_ROUTER}.forward",
            "wrap",
            f"{_IMPL}.router:follow_router",
            "marks one forward of the router, whose later steps use what the gating graph has computed",
            params=("input",),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            f"{_ROUTER}.gating",
            "wrap",
            f"{_IMPL}.router:compile_gating",
            "compiles gating, top-k selection and the aux-loss scores as one graph, starting here",
            params=("input",),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            f"{_ROUTING}:topk_routing_with_score_function",
            "wrap",
            f"{_IMPL}.router:hand_out_selection",
            "returns the routing that the compiled gating graph has computed",
            params=("logits", "topk"),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            f"{_ROUTING}:compute_routing_scores_for_aux_loss",
            "wrap",
            f"{_IMPL}.router:hand_out_scores",
            "returns the aux-loss scores that the compiled gating graph has computed",
            params=("logits", "topk", "score_function"),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            "megatron.core.transformer.moe.shared_experts:SharedExpertMLP.forward",
            "wrap",
            f"{_IMPL}.shared_expert:compile_shared_expert",
            "compiles the shared expert's products and the chain of operators between them as one graph",
            params=("hidden_states",),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
    ),
    requires=Requires(versions={"megatron-core": _RELEASES, "torch": ">=2.13"}),
    check=check_regions,
    doc="compile-regions.md",
)
