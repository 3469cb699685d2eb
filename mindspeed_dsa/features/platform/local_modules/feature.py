"""Megatron's own modules where Transformer Engine and Apex are missing, as on every NPU and CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.patches.spec import Patch


def is_needed(settings: Any) -> bool:
    """Without Transformer Engine: away from GPUs, and wherever the implementation was named."""
    if find_spec("transformer_engine") is not None:
        return False
    return bool(settings.platform != "cuda" or settings.transformer_impl)


_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_REFUSE = "mindspeed_dsa.features.platform.local_modules.specifications:refuse_transformer_engine"

FEATURE = Feature(
    name="local-modules",
    summary="Megatron's own modules and distributed optimizer work where Transformer Engine and Apex are not "
    "installed, and a model that needs Transformer Engine says so.",
    flags=(Flag("--transformer-impl", "Megatron's own flag.", kind="value", megatron=True),),
    patches=(
        Patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "wrap",
            "mindspeed_dsa.megatron.local_norms:norm_for_every_setting",
            "PyTorch's norms are rejected with sequence parallelism and zero-centered gamma",
            params=("config", "hidden_size", "eps"),
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
            "megatron.core.fp8_utils:quantize_param_shard",
            "wrap",
            "mindspeed_dsa.features.platform.local_modules.no_fp8:unless_there_are_none",
            "the distributed optimizer quantises its fp8 weights, of which there are none, and fails",
            params=("model_params",),
            versions="<0.13",
        ),
        *(
            Patch(
                f"{_SPECS}:{name}",
                "wrap",
                _REFUSE,
                "a NameError would not say what is missing",
                versions=versions,
                required=False,
            )
            for name, versions in (
                ("get_gpt_layer_with_transformer_engine_spec", ""),
                ("get_gpt_layer_with_transformer_engine_submodules", ">=0.17"),
                ("get_gpt_decoder_layer_specs", ">=0.16"),
                ("get_gpt_decoder_block_spec", ""),
                ("get_gpt_mtp_block_spec", ""),
            )
        ),
    ),
    active=is_needed,
    doc="local-modules.md",
    platform_support=True,
)
