"""Repairs of module specs for DSA models: choice of the spec, MTP layers, and local modules.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.dsa.repairs.feature import Options
from mindspeed_dsa.megatron.local_modules import (
    duplicated_linear,
    layer_norm_column_parallel_linear,
)

# -- spec-dispatch -----------------------------------------------------------------------------


def dispatch_dsa(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate the function that builds an attention variant's spec, to build DSA's spec for DSA models."""

    def get_experimental_attention_variant_module_spec(config: Any, backend: Any = None) -> Any:
        if config.experimental_attention_variant != "dsa":
            return original(config, backend)
        specs = context.megatron("core.models.gpt.experimental_attention_variant_module_specs")
        if backend is None:
            backend = specs._get_backend_spec_provider(config=config)
        spec = specs.get_dsa_module_spec_for_backend(config=config, backend=backend)
        # The block builder reads this attribute. The input norm is not part of MLA's attention module.
        spec.metainfo["fuse_input_layernorm"] = False
        return spec

    return get_experimental_attention_variant_module_spec


def layer_specs_with_dsa(original: Callable[..., Any], context: Context[None]) -> Callable[..., Any]:
    """Decorate the function that returns MTP's layer specs, to return DSA layers in DSA models.

    MLA passes more inputs to a DSA core attention than other core attentions accept. From 0.19 on, the
    original function rejects DSA, so the wrapper calls the function that returns all layers' specs.
    """

    def get_gpt_decoder_layer_specs(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.experimental_attention_variant != "dsa":
            return original(config, *args, **kwargs)
        specs = context.megatron("core.models.gpt.experimental_attention_variant_module_specs")
        of_layers = getattr(specs, "get_transformer_layer_with_experimental_attention_variant_spec", None)
        if of_layers is not None:
            return of_layers(config)
        # The block spec has the layers of one pipeline stage, but the caller needs all layers of the model:
        # build it as for one stage.
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


# -- local-provider: modules where Megatron requires Transformer Engine ---------------------


def full_copy_linear(context: Context[Options]) -> type:
    """Return the class that replaces ``Linear`` in MLA's module: a replicated linear layer."""
    return duplicated_linear(context.megatron)


def provide_local_modules(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``_get_backend_spec_provider`` to return our provider for ``transformer_impl="local"``."""

    def _get_backend_spec_provider(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.transformer_impl != "local":
            return original(config, *args, **kwargs)
        return local_spec_provider(context.megatron, context.options.groups_experts)()

    return _get_backend_spec_provider


@cache
def local_spec_provider(megatron: Megatron, groups_experts: bool) -> type:
    """Build our subclass of a Megatron's ``LocalSpecProvider``.

    Args:
        megatron: accessor of the Megatron modules.
        groups_experts: whether Megatron's provider supports ``--moe-grouped-gemm`` without the grouped_gemm
            package.
    """
    base: Any = megatron("core.models.backends").LocalSpecProvider
    torch_norm: Any = megatron("core.transformer.torch_norm").WrappedTorchNorm

    class LocalDSASpecProvider(base):
        """Megatron's local spec provider, extended by the modules that DSA specs need."""

        def linear(self) -> type:
            """Return the class of linear layers that are replicated over tensor parallel ranks."""
            return duplicated_linear(megatron)

        def fuse_layernorm_and_linear(self) -> bool:
            """Return True, which gives parameters the same names as with Transformer Engine."""
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            """Return the module that combines norm and column parallel linear."""
            return layer_norm_column_parallel_linear(megatron)

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **kwargs: Any) -> Any:
            """Return Megatron's norm class, but leave the default norm of Megatron's module unchanged."""
            return torch_norm if rms_norm else super().layer_norm(rms_norm=False, for_qk=for_qk, **kwargs)

        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *args: Any) -> Any:
            """Return sequential experts if grouped GEMM kernels are not installed; results are the same."""
            if moe_use_grouped_gemm and not groups_experts and find_spec("grouped_gemm") is None:
                warnings.warn(
                    "dsa-repairs: --moe-grouped-gemm needs the grouped_gemm package, which is not "
                    "installed; the experts run sequentially instead",
                    stacklevel=2,
                )
                moe_use_grouped_gemm = False
            return super().grouped_mlp_modules(moe_use_grouped_gemm, *args)

    return LocalDSASpecProvider
