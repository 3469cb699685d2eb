"""Our operators as a kernel backend of Megatron-core 0.19, through its hooks."""

from __future__ import annotations

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature
from mindspeed_dsa.features.dsa.feature import FUSED, USE_FUSED_DSA
from mindspeed_dsa.features.dsa.kernel_hooks.options import Options, kernel_hooks_wanted
from mindspeed_dsa.features.dsa.kernel_hooks.validation import check_kernel_hooks
from mindspeed_dsa.megatron.dsa import DSA, SHARED_KEYS, megatron_flag
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.kernel_hooks"
_ABSORBED = f"{DSA.rpartition('.')[0]}.absorbed_mla:AbsorbedMLASelfAttention"
_CONFIG = "megatron.core.transformer.transformer_config"
_RELEASES = ">=0.19,<0.21"
_OF_OPERATORS = tuple(flag for flag in FUSED.flags if flag.dest in ("dsa_backend", "dsa_cpu_bf16"))

FEATURE = Feature(
    name="dsa-kernel-backend",
    summary="Our DSA operators behind the kernel hooks of Megatron-core 0.19, on any device.",
    flags=(
        megatron_flag("--dsa-kernel-backend"),
        USE_FUSED_DSA,
        *(flag for flag in FUSED.flags if flag.dest.startswith("use_") and flag != USE_FUSED_DSA),
        *_OF_OPERATORS,
        EXPERIMENTAL_ATTENTION_VARIANT,
    ),
    active=kernel_hooks_wanted,
    options=Options.of,
    validate=check_kernel_hooks,
    on_finalize=FUSED.on_finalize,
    doc="dsa-kernel-backend.md",
    patches=(
        Patch(
            f"{DSA.rpartition('.')[0]}.dsa_kernels:_BACKEND_MODULE_NAME_BY_BACKEND",
            "entry",
            f"{_HERE}.hooks:module_name",
            "Megatron's table of kernel backends",
            versions=_RELEASES,
            key="mindspeed",
            factory=True,
        ),
        Patch(
            "megatron.core.utils:_validate_dsa_kernel_backend_dependencies",
            "wrap",
            f"{_HERE}.choice:accept_our_backend",
            "Megatron knows only its own backends, and requires CUDA for them",
            params=("dsa_kernel_backend",),
            versions=_RELEASES,
        ),
        *(
            Patch(
                f"{_CONFIG}:{name}.__dataclass_fields__",
                "entry",
                f"{_HERE}.choice:FIELD",
                "Megatron-LM reads the choices of --dsa-kernel-backend from the field",
                versions=_RELEASES,
                key="dsa_kernel_backend",
            )
            for name in ("TransformerConfig", "MLATransformerConfig")
        ),
        Patch(
            f"{_CONFIG}:TransformerConfig.__post_init__",
            "wrap",
            f"{_HERE}.choice:choose_our_backend",
            "--use-fused-dsa selects the backend without a second flag",
            versions=_RELEASES,
        ),
        Patch(
            f"{_ABSORBED}.get_query_key_value_tensors",
            "wrap",
            f"{_HERE}.shared_keys:start_with_the_key",
            "Megatron gathers keys of context parallel ranks when everything else is done",
            params=("hidden_states", "key_value_states", "packed_seq_params", "inference_context"),
            versions=SHARED_KEYS,
        ),
        Patch(
            f"{_ABSORBED}._checkpointed_attention_forward",
            "wrap",
            f"{_HERE}.shared_keys:wait_before_checkpoint",
            "a gather under way cannot be recomputed",
            params=("q_absorbed", "k_compressed"),
            versions=SHARED_KEYS,
        ),
        Patch(
            f"{_ABSORBED}.forward",
            "wrap",
            "mindspeed_dsa.features.dsa.key_exchange.core_attention:gather_again_early",
            "the keys that backward reads are gathered behind the output projection's backward",
            versions=SHARED_KEYS,
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.shared_keys:attend_to_shared_keys",
            "Megatron's form gathers keys in three blocking collectives, and keeps them until backward",
            params=(
                "query",
                "key",
                "value",
                "attention_mask",
                "x",
                "qr",
                "position_ids",
                "attn_mask_type",
                "packed_seq_params",
                "up_v_weight",
            ),
            versions=SHARED_KEYS,
        ),
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{_HERE}.shared_keys:mark_where_keys_are_shared",
            "what projects a rank's own rows has a part of the gradient, to be summed",
            versions=SHARED_KEYS,
            priority=100,  # after the mark that asks for an average
        ),
    ),
)
