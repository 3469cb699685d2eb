"""Our operators as a DSA kernel backend for Megatron-core 0.19's kernel hooks.

tests: tests/matrix/test_kernel_backend.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature
from mindspeed_dsa.features.dsa import feature as fused_dsa
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import DSA, KERNELS, megatron_flag
from mindspeed_dsa.megatron.dsa import Options as FusedOptions
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch

if TYPE_CHECKING:
    from typing_extensions import Self


def refusals(chosen: FusedOptions) -> list[str]:
    """Return a message, with a fix, per set option that Megatron-core 0.19 and later do not support."""
    if not chosen.fuse_kl_in_backward:
        return []
    return ["--dsa-fuse-kl-in-backward requires Megatron-core 0.16 to 0.18; omit it"]


def check_kernel_hooks(args: Any, options: Any) -> Iterator[str]:
    """Yield a named backend without operators, and :func:`refusals` where this Megatron has the hooks."""
    release, backend = versions.of_job(args), argument(args, "dsa_backend")
    is_named, fused = backend not in (None, "auto"), FusedOptions.of(args)
    has_dsa = getattr(args, "experimental_attention_variant", "dsa") == "dsa"
    if is_named and not has_dsa and not fused.any_part:  # else fused-dsa says so
        yield (
            f"--dsa-backend {backend} chooses operators of DSA, and the model has none; add "
            "--experimental-attention-variant dsa, or omit it"
        )
    elif release is not None and release in SpecifierSet(">=0.19", prereleases=True):
        yield from refusals(fused)
        yield from fused_dsa.refuse_packs_in_graphs(args)
        if fused.learns_served:
            yield from fused_dsa.refuse_packs_of_megatron(args, "--dsa-indexer-loss-layers")
    elif release is None or release in SpecifierSet("<0.16", prereleases=True):
        return
    elif is_named and not (fused.any_part or fused.attends_densely):
        yield f"--dsa-backend {backend} names no operator that runs; add --use-fused-dsa, or omit it"


@dataclass(frozen=True)
class Options(FusedOptions):
    """Options of fused DSA. If the job requests no part, all parts of DSA run on our operators."""

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Build from resolved settings."""
        options = super().of(settings)
        if options.any_part:
            return options
        return replace(options, absorb=True, indexer=True, attention=True, kl_loss=True)


def kernel_hooks_wanted(settings: Any) -> bool:
    """Return whether a flag of fused DSA is set, or Megatron's backend flag names our backend.

    Also True in stages with dense attention, unless Megatron's flag names another backend.
    """
    options, kernels = FusedOptions.of(settings), settings.dsa_kernel_backend
    named = getattr(settings, "dsa_backend", "auto") != "auto" or kernels == "mindspeed"
    return options.any_part or named or (options.attends_densely and kernels in (None, "none"))


_HERE = "mindspeed_dsa.features.dsa.kernel_hooks"
_ABSORBED = f"{DSA.rpartition('.')[0]}.absorbed_mla:AbsorbedMLASelfAttention"
_CONFIG = "megatron.core.transformer.transformer_config"
_OF_OPERATORS = tuple(
    flag
    for flag in fused_dsa.FUSED.flags
    if flag.dest in ("dsa_backend", "dsa_indexer_precision", "dsa_indexer_loss_layers")
)

FEATURE = Feature(
    name="dsa-kernel-backend",
    supplies=("fused-dsa",),
    summary="Our DSA operators behind the kernel hooks of Megatron-core 0.19, on any device.",
    flags=(
        megatron_flag("--dsa-kernel-backend"),
        fused_dsa.USE_FUSED_DSA,
        *(
            flag
            for flag in fused_dsa.FUSED.flags
            if flag.dest.startswith("use_") and flag != fused_dsa.USE_FUSED_DSA
        ),
        *_OF_OPERATORS,
        EXPERIMENTAL_ATTENTION_VARIANT,
    ),
    active=kernel_hooks_wanted,
    options=Options.of,
    check=check_kernel_hooks,
    doc="dsa-kernel-backend.md",
    patches=(
        Patch(
            f"{DSA.rpartition('.')[0]}.dsa_kernels:_BACKEND_MODULE_NAME_BY_BACKEND",
            "entry",
            f"{_HERE}.hooks:module_name",
            "Megatron's table of kernel backends lacks ours",
            versions=KERNELS,
            key="mindspeed",
            factory=True,
        ),
        Patch(
            "megatron.core.utils:_validate_dsa_kernel_backend_dependencies",
            "wrap",
            f"{_HERE}.hooks:accept_our_backend",
            "Megatron knows only its own backends, and requires CUDA for them",
            params=("dsa_kernel_backend",),
            versions=KERNELS,
        ),
        *(
            Patch(
                f"{_CONFIG}:{name}.__dataclass_fields__",
                "entry",
                f"{_HERE}.hooks:FIELD",
                "Megatron-LM reads the choices of --dsa-kernel-backend from the field",
                versions=KERNELS,
                key="dsa_kernel_backend",
            )
            for name in ("TransformerConfig", "MLATransformerConfig")
        ),
        Patch(
            f"{_CONFIG}:TransformerConfig.__post_init__",
            "wrap",
            f"{_HERE}.hooks:choose_our_backend",
            "--use-fused-dsa selects the backend without a second flag",
            versions=KERNELS,
        ),
        Patch(
            f"{_ABSORBED}.get_query_key_value_tensors",
            "wrap",
            f"{_HERE}.shared_keys:start_with_the_key",
            "Megatron gathers keys of context parallel ranks when everything else is done, and joins parts "
            "that NPUs take apart",
            params=("hidden_states", "key_value_states", "packed_seq_params", "inference_context"),
            versions=KERNELS,
        ),
        Patch(
            f"{_ABSORBED}._checkpointed_attention_forward",
            "wrap",
            f"{_HERE}.shared_keys:wait_before_checkpoint",
            "a gather of keys under way cannot be recomputed",
            params=("q_absorbed", "k_compressed"),
            versions=KERNELS,
        ),
        Patch(
            f"{_ABSORBED}.forward",
            "wrap",
            "mindspeed_dsa.features.dsa.key_exchange.layers:gather_again_early",
            "the keys that backward reads are gathered behind the output projection's backward",
            versions=KERNELS,
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.shared_keys:attend_to_shared_keys",
            "Megatron's DSA gathers keys in three blocking collectives, and keeps them until backward",
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
            versions=KERNELS,
        ),
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{_HERE}.shared_keys:mark_where_keys_are_shared",
            "key and weights are projected from a rank's own rows: their gradients are parts, to be summed",
            versions=KERNELS,
            priority=100,  # after the wrapper that marks gradients as averages
        ),
    ),
)
