"""Selection of DSA: Megatron's spec functions support the variant, for the decoder and for MTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.megatron.dsa import SPECS, dsa_repair
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.spec_dispatch"


def check_dsa_model(args: Any, options: Any) -> Sequence[str]:
    """Report missing sizes and options that Megatron's DSA does not support; absent ones are not checked."""
    given = {name: getattr(args, name) for name in _READ if hasattr(args, name)}
    if given.get("experimental_attention_variant") != "dsa":
        return ()
    problems = [
        f"DSA needs --{name.replace('_', '-')}; DeepSeek-V3.2 has {usual}"
        for name, usual in _SIZES.items()
        if name in given and given[name] is None
    ]
    if not given.get("multi_latent_attention", True):
        problems.append("DSA is built on latent attention; add --multi-latent-attention")
    head, rotary = given.get("dsa_indexer_head_dim"), given.get("qk_pos_emb_head_dim")
    if head is not None and rotary is not None and head < rotary:
        problems.append(
            f"--dsa-indexer-head-dim {head} has no room for the --qk-pos-emb-head-dim {rotary} in "
            "it; make it at least as large"
        )
    release = versions.of_megatron(getattr(args, "megatron_root", "megatron"))
    lacks_fused_rope = release is not None and release in SpecifierSet("<0.19", prereleases=True)
    if lacks_fused_rope and given.get("apply_rope_fusion"):
        problems.append(f"Megatron-core {release} does not support fused RoPE with DSA; add --no-rope-fusion")
    return problems


_SIZES = {"dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048}
_READ = (
    *_SIZES,
    "experimental_attention_variant",
    "multi_latent_attention",
    "qk_pos_emb_head_dim",
    "apply_rope_fusion",
)


FEATURE = dsa_repair(
    "dsa-spec-dispatch",
    summary="Makes --experimental-attention-variant dsa build a model.",
    switch_help="Let Megatron's spec functions build DSA layers.",
    check=check_dsa_model,
    patches=(
        Patch(
            f"{SPECS}:get_experimental_attention_variant_module_spec",
            "wrap",
            f"{_HERE}.specs:dispatch_dsa",
            "the dispatcher rejects 'dsa', and the DSA spec lacks an attribute that the block builder reads",
            params=("config", "backend"),
            versions=">=0.16,<0.18",
        ),
        Patch(
            "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_layer_specs",
            "wrap",
            f"{_HERE}.specs:layer_specs_with_dsa",
            "MTP layers get a core attention that fails on the inputs of DSA",
            params=("config",),
            versions=">=0.16,<0.19",
        ),
    ),
)
