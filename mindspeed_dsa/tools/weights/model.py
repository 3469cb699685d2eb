"""Builds a Megatron model on the meta device; its sharded state dict gives a checkpoint's keys and shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import socket
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed_dsa import session
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError

_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_layer_freq", "moe_ffn_hidden_size",
    "moe_router_topk", "moe_shared_expert_intermediate_size", "mtp_num_layers", "dsa_indexer_n_heads",
    "dsa_indexer_head_dim", "dsa_indexer_topk", "num_query_groups", "kv_channels", "add_qkv_bias",
    "qk_layernorm", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
)  # fmt: skip
_SHARING = (
    "dsa_indexer_topk_freq",
    "dsa_indexer_skip_topk_offset",
    "dsa_indexer_topk_pattern",
    "dsa_indexer_share_for_mtp",
)


def release_here() -> str:
    """Return the installed release of Megatron-core.

    Raises:
        SettingsError: Megatron-core is not installed.
    """
    release = versions.of_megatron()
    if release is None:
        raise SettingsError(
            "mindspeed_dsa weights: Megatron-core is not installed: pip install 'mindspeed_dsa[megatron]'"
        )
    return release


@contextlib.contextmanager
def built(values: Mapping[str, Any], vocabulary: int, dtype: torch.dtype) -> Iterator[Any]:
    """Build Megatron's complete model on the meta device, as on a single rank.

    Args:
        values: dict from argument to value, for Megatron's model.
        vocabulary: number of padded embedding rows.
        dtype: dtype of the parameters.

    Yields:
        The ``GPTModel``; process groups and patches end with the block.
    """
    with features(values), one_rank_for_all(Megatron()):
        yield chunk(values, vocabulary, dtype)


@contextlib.contextmanager
def features(values: Mapping[str, Any]) -> Iterator[None]:
    """Switch on the features that a model's classes need, inside a ``with`` block."""
    switches: dict[str, Any] = {"multi_latent_attention": True, "transformer_impl": "local"}
    if values.get("experimental_attention_variant") == "dsa":
        switches = {"experimental_attention_variant": "dsa", **_sharing(values)}
    with session.enabled(mindspeed_platform="cpu", **switches):
        yield


def _sharing(values: Mapping[str, Any]) -> dict[str, Any]:
    sparse = values.get("experimental_attention_variant") == "dsa"
    return {name: values[name] for name in _SHARING if sparse and values.get(name) is not None}


def chunk(
    values: Mapping[str, Any],
    vocabulary: int,
    dtype: torch.dtype,
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Build a model on the meta device, with the current features and process groups.

    Args:
        values: dict from argument to value, for Megatron's model.
        vocabulary: number of padded embedding rows.
        dtype: dtype of the parameters.
        sizes: additional fields of the transformer configuration.
    """
    # Hide the start report, the table of active features: this is no training job.
    with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()):
        model = _gpt_model(values, vocabulary, dtype, {**_sharing(values), **sizes})
    model.to(dtype)  # as Megatron's Float16Module does, except for the experts' bias, which stays fp32
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.data = buffer.data.float()
    return model


def _gpt_model(
    values: Mapping[str, Any], vocabulary: int, dtype: torch.dtype, said: Mapping[str, Any]
) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind, latent = TransformerConfig, {}
    if values["multi_latent_attention"]:
        # YaRN's tables cannot be computed on the meta device.
        kind, latent = MLATransformerConfig, {"multi_latent_attention": True, "rope_type": "rope"}
    # Fields of this release: arguments that it does not know are left out below.
    fields = {field.name for field in dataclasses.fields(kind)}
    sparse = values.get("experimental_attention_variant") == "dsa"
    more = {
        "num_moe_experts": values.get("num_experts"),
        "experimental_attention_variant": "dsa" if sparse else None,
        "transformer_impl": "local",
        **said,
    }
    config = kind(
        **{name: values[name] for name in _SIZES if values.get(name) is not None and name in fields},
        **{name: value for name, value in more.items() if value is not None and name in fields},
        **latent,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    block = _block_spec(config)
    mtp = {}
    if config.mtp_num_layers:
        layers = getattr(gpt_layer_specs, "get_gpt_decoder_layer_specs", None)
        layer = layers(config, use_transformer_engine=False)[-1] if layers and not sparse else block
        mtp["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, layer, use_transformer_engine=False
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=vocabulary,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=not values["untie_embeddings_and_output_weights"],
        **mtp,
    )


def _block_spec(config: Any) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    if getattr(config, "experimental_attention_variant", None) == "dsa":
        with contextlib.suppress(ImportError):  # before 0.16 DSA is built into the spec of all MLA layers
            from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

            return specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    return gpt_layer_specs.get_gpt_decoder_block_spec(config, False, normalization=config.normalization)


@contextlib.contextmanager
def one_rank_for_all(megatron: Megatron, backend: str = "gloo") -> Iterator[None]:
    """Initialize Megatron's process groups with model parallel size 1, and destroy them after the block.

    Args:
        megatron: Megatron package of the groups.
        backend: backend of the default process group, if it does not exist yet.
    """
    state, random = megatron("core.parallel_state"), megatron("core.tensor_parallel.random")
    alone = not dist.is_initialized()
    if alone:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    try:
        state.initialize_model_parallel()
        random.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        state.destroy_model_parallel()
        if alone:
            dist.destroy_process_group()
