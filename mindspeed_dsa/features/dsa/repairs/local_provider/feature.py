"""DSA without Transformer Engine: ``--transformer-impl local``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.megatron.dsa import MLA, SPECS, dsa_repair, megatron_flag
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.local_provider"


@dataclass(frozen=True)
class Options:
    """Facts of this session.

    Attributes:
        groups_experts: Megatron's own provider has experts for ``--moe-grouped-gemm``.
    """

    groups_experts: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(groups_experts="moe-grouped-gemm" in getattr(settings, "features_on", ()))


def check_transformer_engine(args: Any, options: Any) -> Sequence[str]:
    """Report a missing Transformer Engine, which Megatron's default implementation needs."""
    if getattr(args, "transformer_impl", None) != "transformer_engine" or find_spec("transformer_engine"):
        return ()
    problem = (
        "--transformer-impl transformer_engine (Megatron's default) needs Transformer Engine, which is not "
        "installed; add --transformer-impl local"
    )
    return (problem,)


_IMPL = f"{_HERE}.modules"

FEATURE = dsa_repair(
    "dsa-local-provider",
    summary="Builds MLA + DSA + MoE from Megatron's own layers, without Transformer Engine.",
    switch_help="Support --transformer-impl local for DSA models.",
    check=check_transformer_engine,
    options=Options.of,
    megatron_flags=(megatron_flag("--transformer-impl"),),
    patches=(
        Patch(
            f"{SPECS}:_get_backend_spec_provider",
            "wrap",
            f"{_IMPL}:provide_local_modules",
            "the spec functions require Transformer Engine",
            params=("config",),
            versions=">=0.16,<0.21",
        ),
        Patch(
            f"{MLA}:__dict__",
            "entry",
            f"{_IMPL}:full_copy_linear",
            "MLA accepts a replicated down projection only under the name Linear",
            versions=">=0.16,<0.21",
            key="Linear",
            factory=True,
        ),
        Patch(
            "megatron.core.transformer.experimental_attention_variant.absorbed_mla:__dict__",
            "entry",
            f"{_IMPL}:full_copy_linear",
            "absorbed MLA accepts a replicated down projection only under the name Linear",
            versions=">=0.19,<0.21",
            key="Linear",
            factory=True,
        ),
        Patch(
            f"{MLA}:HAVE_TE",
            "value",
            "mindspeed_dsa.megatron.local_modules:transformer_engine_is_usable",
            "MLA assumes that Transformer Engine is available and fails in an isinstance check",
            versions=">=0.16,<0.17",
            factory=True,
        ),
        Patch(
            "megatron.core.transformer.moe.moe_utils:router_gating_linear",
            "wrap",
            "mindspeed_dsa.megatron.router:gate_without_transformer_engine",
            "the router uses a name that is undefined without Transformer Engine",
            params=("inp", "weight", "router_dtype"),
            versions=">=0.13,<0.17",
        ),
        Patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "wrap",
            "mindspeed_dsa.megatron.local_norms:norm_for_every_setting",
            "the PyTorch norms are rejected with sequence parallelism and zero-centered gamma",
            params=("config", "hidden_size", "eps"),
            versions=">=0.12.1,<0.21",
        ),
    ),
)
