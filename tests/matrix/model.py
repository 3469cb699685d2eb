"""A tiny MLA + DSA model that every release from 0.12.1 on can build, and a training step of it."""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support import model as job

EXPERTS = {**job.EXPERTS, "moe_layer_freq": [0, 1]}
# Later releases fuse norms into linear layers; these are the names in the oldest release.
_NAMES = {
    "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
    "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def config(**overrides: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    values: dict[str, Any] = {
        "num_layers": 2,
        **job.LAYERS,
        **job.LATENT,
        **job.DSA,
        # Releases take YaRN's magnitude from different fields, even without YaRN.
        "rotary_scaling_factor": 1.0,
        "dsa_indexer_n_heads": 8,
    }
    values |= overrides
    if values["experimental_attention_variant"] is None:  # older releases get the field with DSA
        values = {name: value for name, value in values.items() if not name.startswith(("dsa_", "experim"))}
    return MLATransformerConfig(**values)


_config = config


def local_modules() -> dict[str, str]:
    """Return the field that selects local modules in releases with a DSA spec, otherwise nothing."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    return {"transformer_impl": "local"} if "transformer_impl" in fields else {}


def config_with_experts(**overrides: Any) -> Any:
    """Return a configuration with experts and local modules, in place of :func:`config`."""
    # RMSNorm is several operations on a CPU: recomputed, its gradient is rounded differently.
    return _config(**{**EXPERTS, "normalization": "LayerNorm", **local_modules(), **overrides})


def gpt_model(cfg: Any, vp_stage: int | None = None) -> Any:
    """Build a pipeline chunk from Megatron's spec, with weights that depend only on their names."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    stage = {}
    if vp_stage is not None:
        # Older releases read the stage from global state, later ones take an argument.
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
        stage = _accepted(GPTModel.__init__, vp_stage=vp_stage)
    where = _accepted(parallel_state.is_pipeline_first_stage, ignore_virtual=False, **stage)
    block = _block_spec(cfg, stage)
    if cfg.mtp_num_layers:
        stage["mtp_block_spec"] = _mtp_spec(cfg, block, stage)
    model = GPTModel(
        config=cfg,
        transformer_layer_spec=block,
        **job.ends(**where),
        **stage,
    )
    model.vp_stage = vp_stage
    fill_by_name(model)
    return model


def _accepted(function: Any, **arguments: Any) -> dict[str, Any]:
    """Return the arguments that the function accepts in this release."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _block_spec(cfg: Any, stage: dict[str, Any]) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    dense = getattr(cfg, "experimental_attention_variant", None) is None
    try:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    except ImportError:
        dense = True  # the specification of all latent attention has DSA
    if dense:
        return get_gpt_decoder_block_spec(cfg, False, normalization=cfg.normalization, **stage)
    return specs.get_transformer_block_with_experimental_attention_variant_spec(cfg, **stage)


def _mtp_spec(cfg: Any, block: Any, stage: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    layers = getattr(gpt_layer_specs, "get_gpt_decoder_layer_specs", None)
    layer = block if layers is None else layers(cfg, use_transformer_engine=False)[-1]
    return gpt_layer_specs.get_gpt_mtp_block_spec(cfg, layer, use_transformer_engine=False, **stage)


def common_name(name: str) -> str:
    """Return a parameter's name in the oldest release."""
    for fused, plain in _NAMES.items():
        name = name.replace(fused, plain)
    return name


@torch.no_grad()
def fill_by_name(model: torch.nn.Module) -> None:
    for name, parameter in job.global_names(model).items():
        name = common_name(name)
        parameter.copy_(job.shard(name, weight_of(name, job._full_shape(parameter)), parameter))


def weight_of(name: str, shape: Sequence[int]) -> Tensor:
    """Return a parameter's weight, which depends only on its name in the oldest release."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 1 + 0.1 * noise if "norm" in name and not name.endswith("bias") else 0.2 * noise


def one_step(
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    num_microbatches: int = 1,
    micro_batch_size: int = 4,
    grad_scale: float | None = None,
    sequence_parallel: bool = True,
    **layout: Any,
) -> dict[str, Any]:
    """Run a training step through Megatron's schedules; return losses, gradients and indexer loss."""
    job.start(switches, **layout)
    from megatron.core import parallel_state

    tp, pp, vpp = layout.get("tp", 1), layout.get("pp", 1), layout.get("vpp")
    cfg = config(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1 and sequence_parallel,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        overlap_p2p_comm=bool(vpp),
        batch_p2p_comm=not vpp,
        **(overrides or {}),
    )
    if grad_scale is not None:
        cfg.grad_scale_func = lambda loss: loss * grad_scale
    chunks = [gpt_model(cfg, stage) for stage in (range(vpp) if vpp else [None])]
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    batch = job.samples(num_microbatches * micro_batch_size * ranks)
    mine = batch.view(num_microbatches, ranks, micro_batch_size, -1)[:, rank]
    losses = job.train_step(cfg, chunks, list(mine))
    return {
        "losses": [float(entry["lm loss"]) for entry in losses] if losses else [],
        "indexer loss": logged_indexer_loss(num_microbatches),
        "gradients": {common_name(name): g for name, g in job.gradients(chunks).items()},
        "split": {common_name(name): dim for name, dim in job.split_dimensions(chunks).items()},
    }


def logged_indexer_loss(num_microbatches: int) -> float | None:
    from mindspeed_dsa.feature import Megatron
    from mindspeed_dsa.features.dsa.indexer_loss import indexer_loss

    losses: dict[str, Tensor] = {}
    indexer_loss(Megatron()).tracker.track_indexer_metrics(
        1 / num_microbatches, 1, None, total_loss_dict=losses
    )
    return float(losses["indexer loss"]) if losses else None
