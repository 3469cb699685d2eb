"""DSA in Megatron's functions that return module specs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mindspeed_dsa.feature import Context


def dispatch_dsa(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate the dispatcher: ``experimental_attention_variant="dsa"`` builds the DSA spec."""

    def get_experimental_attention_variant_module_spec(config: Any, backend: Any = None) -> Any:
        if config.experimental_attention_variant != "dsa":
            return original(config, backend)
        specs = context.megatron("core.models.gpt.experimental_attention_variant_module_specs")
        if backend is None:
            backend = specs._get_backend_spec_provider(config=config)
        spec = specs.get_dsa_module_spec_for_backend(config=config, backend=backend)
        # The block builder reads whether the input norm is part of the attention module; MLA's is not.
        spec.metainfo["fuse_input_layernorm"] = False
        return spec

    return get_experimental_attention_variant_module_spec


def layer_specs_with_dsa(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate the layer specs for MTP: MLA passes a DSA core attention more inputs than others accept."""

    def get_gpt_decoder_layer_specs(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.experimental_attention_variant != "dsa":
            return original(config, *args, **kwargs)
        specs = context.megatron("core.models.gpt.experimental_attention_variant_module_specs")
        # The block spec holds the layers of one pipeline stage, the caller needs those of the model.
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
