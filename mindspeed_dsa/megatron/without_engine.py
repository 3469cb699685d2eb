"""Patches for Megatron modules that fail if Transformer Engine is missing.

They are shared by several features. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from mindspeed_dsa.patches.spec import Patch

NORMS = Patch(
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    "wrap",
    "mindspeed_dsa.megatron.local_modules:norm_for_every_setting",
    "Megatron rejects PyTorch's norms with sequence parallelism and zero-centered gamma",
    params=("config", "hidden_size", "eps"),
)
ROUTER = Patch(
    "megatron.core.transformer.moe.moe_utils:router_gating_linear",
    "wrap",
    "mindspeed_dsa.megatron.local_modules:gate_without_transformer_engine",
    "the router uses a name that is undefined without Transformer Engine",
    params=("inp", "weight", "router_dtype"),
    versions=">=0.13,<0.17",
)
MLA_ENGINE = Patch(
    "megatron.core.transformer.multi_latent_attention:HAVE_TE",
    "value",
    "mindspeed_dsa.megatron.local_modules:transformer_engine_is_usable",
    "MLA assumes that Transformer Engine is available and fails in an isinstance check",
    versions=">=0.16,<0.17",
    factory=True,
)
