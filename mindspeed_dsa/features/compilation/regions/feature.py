"""``torch.compile`` for the parts of a layer that consist of many small operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        bypass: operators that the compiler neither decomposes nor fuses, as they were written.
    """

    bypass: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments.

        Raises:
            SettingsError: a list without anything to compile.
        """
        bypass = tuple(getattr(settings, "compile_bypass", None) or ())
        if bypass and not getattr(settings, "compile_regions", False):
            raise SettingsError(
                f"--compile-bypass {' '.join(bypass)} does nothing without --compile-regions; add that, or "
                "omit it"
            )
        return cls(bypass)


def regions_wanted(settings: Any) -> bool:
    """On with the switch, or with its list, which is then refused without it."""
    return bool(getattr(settings, "compile_regions", False) or getattr(settings, "compile_bypass", None))


def check_regions(args: Any, options: Any) -> Sequence[str]:
    """Megatron's own ways of taking a layer as a whole."""
    found = []
    if getattr(args, "cuda_graph_impl", "none") not in (None, "none") or getattr(
        args, "enable_cuda_graph", False
    ):
        found.append(
            "--compile-regions compiles at the first steps, which a CUDA graph cannot record; omit "
            "--cuda-graph-impl, or --compile-regions"
        )
    return found


_IMPL = "mindspeed_dsa.features.compilation.regions"
_MLA = "megatron.core.transformer.multi_latent_attention:MLASelfAttention"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_ROUTING = "megatron.core.transformer.moe.moe_utils"
_RELEASES = ">=0.16,<0.19"
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
        Flag(
            "--compile-bypass",
            "ATen operators that the compiler neither decomposes nor fuses: compiled code calls them as they "
            "are, for operators that its own code is slower than.",
            kind="value",
            nargs="+",
            metavar="OP",
        ),
    ),
    patches=(
        Patch(
            f"{_MLA}.__init__",
            "wrap",
            f"{_IMPL}.prolog:offer_to_attention",
            "latent attention in absorbed form asks its layer for compiled steps",
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            f"{_MLA}.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.prolog:compile_prolog",
            "some forty operators lie between the hidden states and query, key and value",
            params=("hidden_states", "packed_seq_params", "inference_context"),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            f"{_ROUTER}.forward",
            "wrap",
            f"{_IMPL}.router:follow_router",
            "what is compiled at its first step is handed out at the later ones",
            params=("input",),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            f"{_ROUTER}.gating",
            "wrap",
            f"{_IMPL}.router:compile_gating",
            "the first of the router's steps, of which scores, selection and map follow",
            params=("input",),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            f"{_ROUTING}:topk_routing_with_score_function",
            "wrap",
            f"{_IMPL}.router:hand_out_selection",
            "it is computed with the logits",
            params=("logits", "topk"),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            f"{_ROUTING}:compute_routing_scores_for_aux_loss",
            "wrap",
            f"{_IMPL}.router:hand_out_scores",
            "they are computed with the logits",
            params=("logits", "topk", "score_function"),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
        Patch(
            "megatron.core.transformer.moe.shared_experts:SharedExpertMLP.forward",
            "wrap",
            f"{_IMPL}.shared_expert:compile_shared_expert",
            "its activation function is a chain of operators between two products",
            params=("hidden_states",),
            versions=_RELEASES,
            priority=_INNERMOST,
        ),
    ),
    requires=Requires(versions={"megatron-core": _RELEASES, "torch": ">=2.13"}),
    active=regions_wanted,
    options=Options.of,
    check=check_regions,
    on_finalize=f"{_IMPL}.bypass:check_operators",
    doc="compile-regions.md",
)
