"""DSA reachable: Megatron's spec functions know the variant, for the decoder and for MTP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa import versions
from mindspeed_dsa.features.attention.declare import HERE, SPECS, dsa_repair
from mindspeed_dsa.features.host import current_root, host
from mindspeed_dsa.patches.spec import Patch


def _check(args: Any) -> Sequence[str]:
    """What a DSA model cannot be built without; arguments that are not there are not judged."""
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
            f"--dsa-indexer-head-dim {head} has no room for the --qk-pos-emb-head-dim {rotary} in it"
        )
    release = versions.of_megatron(current_root())
    if release is not None and release in SpecifierSet("<0.19", prereleases=True):
        if given.get("context_parallel_size", 1) != 1:
            problems.append(
                f"Megatron-core {release} has no context parallelism for DSA; use --context-parallel-size 1"
            )
        if given.get("apply_rope_fusion"):
            problems.append(f"Megatron-core {release} has no fused RoPE for DSA; add --no-rope-fusion")
    return problems


_SIZES = {"dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048}
_READ = (
    *_SIZES,
    "experimental_attention_variant",
    "multi_latent_attention",
    "qk_pos_emb_head_dim",
    "context_parallel_size",
    "apply_rope_fusion",
)


def dispatch_dsa(original: Callable[..., Any]) -> Callable[..., Any]:
    """``experimental_attention_variant="dsa"`` builds the DSA spec; other variants pass through."""

    def get_experimental_attention_variant_module_spec(config: Any, backend: Any = None) -> Any:
        if config.experimental_attention_variant != "dsa":
            return original(config, backend)
        specs = host("core.models.gpt.experimental_attention_variant_module_specs")
        if backend is None:
            backend = specs._get_backend_spec_provider(config=config)
        spec = specs.get_dsa_module_spec_for_backend(config=config, backend=backend)
        # The block builder asks whether the input norm is part of the attention module; MLA's is not.
        spec.metainfo["fuse_input_layernorm"] = False
        return spec

    return get_experimental_attention_variant_module_spec


def layer_specs_with_dsa(original: Callable[..., Any]) -> Callable[..., Any]:
    """Layer specs for MTP: a standard core attention cannot take what MLA hands to a DSA one."""

    def get_gpt_decoder_layer_specs(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.experimental_attention_variant != "dsa":
            return original(config, *args, **kwargs)
        specs = host("core.models.gpt.experimental_attention_variant_module_specs")
        # The block spec holds the layers of one pipeline stage, the caller wants those of the model.
        whole = copy.copy(config)
        whole.pipeline_model_parallel_size = 1
        whole.virtual_pipeline_model_parallel_size = None
        whole.pipeline_model_parallel_layout = None
        whole.num_layers_in_first_pipeline_stage = None
        whole.num_layers_in_last_pipeline_stage = None
        whole.account_for_embedding_in_pipeline_split = False
        whole.account_for_loss_in_pipeline_split = False
        return specs.get_transformer_block_with_experimental_attention_variant_spec(whole).layer_specs

    return get_gpt_decoder_layer_specs


FEATURE = dsa_repair(
    "dsa-spec-dispatch",
    summary="Makes --experimental-attention-variant dsa build a model.",
    switch_help="Let Megatron's spec functions build DSA layers.",
    validate=_check,
    patches=(
        Patch(
            f"{SPECS}:get_experimental_attention_variant_module_spec",
            "wrap",
            f"{HERE}.spec_dispatch:dispatch_dsa",
            "the dispatcher refuses 'dsa', and the DSA spec lacks what the block builder reads",
            params=("config", "backend"),
            versions=">=0.16,<0.18",
        ),
        Patch(
            "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_layer_specs",
            "wrap",
            f"{HERE}.spec_dispatch:layer_specs_with_dsa",
            "MTP layers get a core attention that fails on the inputs of DSA",
            params=("config",),
            versions=">=0.16,<0.19",
        ),
    ),
)
FEATURES = (FEATURE,)
