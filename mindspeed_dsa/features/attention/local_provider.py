"""DSA without Transformer Engine: ``--transformer-impl local``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.features.attention.declare import HERE, MLA, SPECS, dsa_repair, host_flag
from mindspeed_dsa.patches.spec import Patch

_IMPL = f"{HERE}.local_provider_impl"


def _check(args: Any) -> Sequence[str]:
    if getattr(args, "transformer_impl", None) != "transformer_engine" or find_spec("transformer_engine"):
        return ()
    problem = (
        "--transformer-impl transformer_engine (Megatron's default) needs Transformer Engine, which is not "
        "installed; add --transformer-impl local"
    )
    return (problem,)


FEATURE = dsa_repair(
    "dsa-local-provider",
    summary="Builds MLA + DSA + MoE from Megatron's own layers, without Transformer Engine.",
    switch_help="Serve --transformer-impl local for DSA models.",
    validate=_check,
    host_flags=(host_flag("--transformer-impl"),),
    patches=(
        Patch(
            f"{SPECS}:_get_backend_spec_provider",
            "wrap",
            f"{_IMPL}:provide_local_modules",
            "the spec functions insist on Transformer Engine",
            params=("config",),
            versions=">=0.16,<0.20",
        ),
        Patch(
            f"{MLA}:__dict__",
            "entry",
            f"{HERE}.local_modules:DuplicatedLinear",
            "MLA accepts a full-copy down projection only under the name Linear",
            versions=">=0.16,<0.20",
            key="Linear",
        ),
        Patch(
            "megatron.core.transformer.experimental_attention_variant.absorbed_mla:__dict__",
            "entry",
            f"{HERE}.local_modules:DuplicatedLinear",
            "absorbed MLA accepts a full-copy down projection only under the name Linear",
            versions=">=0.19,<0.20",
            key="Linear",
        ),
        Patch(
            f"{MLA}:HAVE_TE",
            "value",
            f"{HERE}.te_presence:TRANSFORMER_ENGINE_IS_USABLE",
            "MLA believes that Transformer Engine is there and fails in an isinstance check",
            versions=">=0.16,<0.17",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_utils:router_gating_linear",
            "wrap",
            f"{_IMPL}:gate_without_transformer_engine",
            "the router uses a name that is undefined without Transformer Engine",
            params=("inp", "weight", "router_dtype"),
            versions=">=0.13,<0.17",
        ),
        Patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "wrap",
            f"{_IMPL}:norm_for_every_setting",
            "the PyTorch norms are refused with sequence parallelism and zero-centred gamma",
            params=("config", "hidden_size", "eps"),
            versions=">=0.12.1,<0.20",
        ),
    ),
)
FEATURES = (FEATURE,)
