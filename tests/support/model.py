"""A tiny MLA + DSA + MoE model and its training step, in any layout; runs in the pool's workers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.model import deterministic_layers, global_names
from mindspeed_dsa.megatron.vocabulary_shards import shard_of

VOCABULARY = 64
SEQUENCE = 20  # unique among the model's dimensions
WITHOUT_EXPERTS = {
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
}
LAYERS = deterministic_layers(ffn_hidden_size=64, params_dtype=torch.float32, pipeline_dtype=torch.float32)
"""Configuration of layers of any kind."""
LATENT: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "multi_latent_attention": True,
    "rope_type": "rope",
    "qk_layernorm": True,
}
"""Latent attention; a value head is as wide as a query's part without positions."""
DSA: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 6,
    "dsa_indexer_loss_coeff": 1.0,
    "dsa_indexer_use_sparse_loss": True,
}
DSA_ON = {"experimental_attention_variant": "dsa"}


def error_of(case: str, **arguments: Any) -> str:
    """Return the error of a case that is expected to fail, without ending the pool's workers."""
    module, _, name = case.partition(":")
    try:
        getattr(import_module(module), name)(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start(
    switches: Mapping[str, Any] | None = None,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    cp: int = 1,
    etp: int | None = None,
) -> None:
    """Enable features, and prepare Megatron's process groups and generators."""
    import mindspeed_dsa

    mindspeed_dsa.enable(**{**DSA_ON, **(switches or {})})
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        context_parallel_size=cp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def config(**overrides: Any) -> Any:
    """Return a miniature of DeepSeek-V3.2: first layer dense, then experts and a shared expert."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    layers = overrides.get("num_layers", 2)
    values: dict[str, Any] = {
        "num_layers": layers,
        "moe_layer_freq": [0] + [1] * (layers - 1),
        "transformer_impl": "local",
        **LAYERS,
        **LATENT,
        **EXPERTS,
        **DSA,
    }
    if "transformer_impl" not in MLATransformerConfig.__dataclass_fields__:
        values.pop("transformer_impl")  # before 0.13 only the specification decides
    return MLATransformerConfig(**{**values, **overrides})


def ends(vocabulary: int = VOCABULARY, length: int = SEQUENCE, **where: Any) -> dict[str, Any]:
    """Return keywords of ``GPTModel`` for its inputs and outputs on this stage.

    Args:
        vocabulary: number of tokens.
        length: sequence length.
        **where: keywords of ``is_pipeline_first_stage`` and ``is_pipeline_last_stage``.
    """
    from megatron.core import parallel_state

    return {
        "vocab_size": vocabulary,
        "max_sequence_length": length,
        "pre_process": parallel_state.is_pipeline_first_stage(**where),
        "post_process": parallel_state.is_pipeline_last_stage(**where),
        "position_embedding_type": "rope",
    }


def gpt_model(cfg: Any, vp_stage: int | None = None, mtp: bool = False) -> Any:
    """Build one pipeline chunk with weights that depend only on their names, never on the layout."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    spec = specs.get_transformer_block_with_experimental_attention_variant_spec(cfg, vp_stage=vp_stage)
    mtp_spec = None
    if mtp:
        layers = gpt_layer_specs.get_gpt_decoder_layer_specs(cfg, use_transformer_engine=False)
        mtp_spec = gpt_layer_specs.get_gpt_mtp_block_spec(
            cfg, layers[-1], use_transformer_engine=False, vp_stage=vp_stage
        )
    model = GPTModel(
        config=cfg,
        transformer_layer_spec=spec,
        **ends(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
        mtp_block_spec=mtp_spec,
    )
    fill_by_name(model)
    return model


def freeze(chunk: torch.nn.Module, name: str) -> torch.nn.Module:
    """Freeze the chunk's module of that name, if it has one; return the chunk."""
    module = getattr(chunk, name, None) if name else None
    if module is not None:
        module.requires_grad_(False)
        for parameter in module.parameters():
            parameter.main_grad = parameter.detach()  # DDP gives a frozen parameter none
    return chunk


@torch.no_grad()
def fill_by_name(model: torch.nn.Module) -> None:
    for name, parameter in global_names(model).items():
        full = _full_shape(parameter)
        # Unlike hash(), crc32 of the name is the same seed in every process.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(full, generator=generator)
        weight = 1 + 0.1 * noise if "norm" in name and not name.endswith("bias") else 0.2 * noise
        parameter.copy_(shard(name, weight, parameter))


def shard(name: str, full: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    """Return this rank's part of a full weight."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if full.shape == parameter.shape:
        return full
    if "linear_fc1" in name:  # the gate's rows first, then the values'
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    part = full.chunk(size, dim=parameter.partition_dim)[rank]
    divided = shard_of(parameter)
    return part if divided is None else part.chunk(divided.cut.pieces)[divided.cut.index]


def _full_shape(parameter: torch.nn.Parameter) -> list[int]:
    from megatron.core import parallel_state

    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    if (divided := shard_of(parameter)) is not None:
        shape[0] *= divided.cut.pieces
    return shape


def samples(count: int, seed: int = 0) -> Tensor:
    """Return ``[count, SEQUENCE + 1]`` token ids."""
    return torch.randint(0, VOCABULARY, (count, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(cfg: Any, loss_mask: Tensor, output: Tensor) -> Any:
    total, count = (output.float() * loss_mask).sum(), loss_mask.sum().to(torch.int)
    if cfg.calculate_per_token_loss:
        return total, count, {"lm loss": torch.stack([total.detach(), count])}
    # The schedule multiplies by the number of context parallel ranks, whose sums are divided by all their
    # tokens.
    mean = total / (count * SEQUENCE / loss_mask.size(1))
    # The schedule divides the loss in place.
    return mean, {"lm loss": mean.detach().clone()}


def own_positions(length: int | None = None) -> Tensor:
    """Return this context parallel rank's positions: chunks ``r`` and ``2c - 1 - r`` of ``2c``."""
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if size == 1:
        return torch.arange(length or SEQUENCE)
    chunks = torch.arange(length or SEQUENCE).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def per_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return losses ``[batch, SEQUENCE]``, a context parallel rank's rows of them; on the last stage."""
    positions = own_positions()
    labels = tokens[:, 1:][:, positions]
    return model(tokens[:, positions], positions.expand(tokens.size(0), -1), None, labels=labels)


def forward_step(cfg: Any, iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    tokens = next(iterator)
    output = per_token_loss(model, tokens)
    return output, partial(loss_of, cfg, torch.ones(tokens.size(0), own_positions().numel()))


def train_step(
    cfg: Any, chunks: list[Any], microbatches: list[Tensor], ddp: Mapping[str, Any] | None = None
) -> Any:
    """Run Megatron's own schedule and gradient finalization once; gradients are in ``main_grad``."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {}))
    wrapped = [
        DistributedDataParallel(cfg, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    cfg.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        cfg.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step_of, cfg),
        data_iterator=[iter(microbatches) for _ in wrapped] if len(wrapped) > 1 else iter(microbatches),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(microbatches),
        seq_length=SEQUENCE,
        micro_batch_size=microbatches[0].size(0),
        forward_only=False,
    )


def _forward_step_of(
    cfg: Any, iterator: Any, model: Any, *unused: Any, return_schedule_plan: bool = False
) -> Any:
    return forward_step(cfg, iterator, model.build_schedule_plan if return_schedule_plan else model)


def gradients(chunks: list[Any], only: str = "") -> dict[str, Tensor]:
    """Return finished gradients of trained parameters by global name, for one tensor parallel rank."""
    finished = {}
    for chunk in chunks:
        for name, parameter in global_names(chunk).items():
            if only in name and parameter.requires_grad:
                finished[name] = parameter.main_grad.detach().clone()
    return finished


def run(
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    num_microbatches: int = 1,
    micro_batch_size: int = 4,
    ddp: Mapping[str, Any] | None = None,
    only: str = "",
    grad_scale: float | None = None,
    sequence_parallel: bool = True,
    **layout: Any,
) -> dict[str, Any]:
    """Run a whole training step; return losses and gradients."""
    start(switches, **layout)
    from megatron.core import parallel_state

    tp, pp, vpp = layout.get("tp", 1), layout.get("pp", 1), layout.get("vpp")
    cfg = config(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1 and sequence_parallel,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=layout.get("ep", 1),
        **(overrides or {}),
    )
    if grad_scale is not None:
        cfg.grad_scale_func = lambda loss: loss * grad_scale
    chunks = [gpt_model(cfg, vp_stage=stage if vpp else None) for stage in range(vpp or 1)]
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    batch = samples(num_microbatches * micro_batch_size * ranks)
    mine = batch.view(num_microbatches, ranks, micro_batch_size, -1)[:, rank]
    losses = train_step(cfg, chunks, list(mine), ddp)
    return {
        "losses": [entry["lm loss"] for entry in losses] if losses else [],
        "gradients": gradients(chunks, only),
        "split": split_dimensions(chunks),
    }


def split_dimensions(chunks: list[Any]) -> dict[str, int | None]:
    """Return the dimension along which tensor parallelism splits each parameter."""
    return {
        name: parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        for chunk in chunks
        for name, parameter in global_names(chunk).items()
    }


def put_together(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Assemble whole gradients from all tensor (or pipeline) parallel ranks; copies must agree."""
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank["gradients"]):
        parts = [rank["gradients"][name] for rank in ranks if name in rank["gradients"]]
        dimension = next(rank["split"][name] for rank in ranks if name in rank["split"])
        if dimension is None or len(parts) == 1:
            for part in parts[1:]:
                torch.testing.assert_close(part, parts[0], rtol=0, atol=0, msg=f"copies of {name} differ")
            whole[name] = parts[0]
        elif "linear_fc1" in name:
            halves = [part.chunk(2) for part in parts]
            whole[name] = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
        else:
            whole[name] = torch.cat(parts, dim=dimension)
    return whole


def losses_of(found: Mapping[str, Any]) -> list[float]:
    """Return the losses of a step that :func:`run` returned."""
    return [float(loss) for loss in found["losses"]]


def assert_same_gradients(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-4
) -> None:
    """Compare every parameter's gradient, relative to its own largest entry."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        atol = rtol * float(gradient.abs().max())
        assert atol > 0 or "expert" in name or "bias" in name, f"{name} has no gradient to compare"
        assert (actual[name] - gradient).abs().max() <= atol, name
