"""Worker functions: fused DSA and Megatron's own DSA on the same weights and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.features.dsa import core_cases
from tests.support import model as job
from tests.support.counting import counted

_topk = torch.Tensor.topk


def stable_topk(scores: Tensor, k: int, dim: int = -1, **others: Any) -> Any:
    """``Tensor.topk`` that breaks ties as the operators do; PyTorch leaves the order open."""
    if others:  # the operators' own call, whose keys already encode the rule
        return _topk(scores, k, dim, **others)
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def ties_to_the_lowest() -> Any:
    """Patch ``Tensor.topk``, which Megatron's indexer calls on its scores."""
    return mock.patch.object(torch.Tensor, "topk", stable_topk)


def one_step(
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    mode: str = "train",
) -> dict[str, Any]:
    """Run :func:`core_cases.one_step` with the same tie-breaking on both sides."""
    with ties_to_the_lowest():
        return core_cases.one_step(overrides or {}, switches, mode)


def step_as_long_sequences(
    switches: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run :func:`one_step` with by-head attention as for long sequences; also return its call counts."""
    from mindspeed_dsa.ops.sparse_flash_attention import by_head, cpu_heads

    # Such a short sequence would otherwise be too short for by-head attention.
    with mock.patch.object(by_head, "_FEWEST_KEYS", 1), counted(cpu_heads, "forward", "backward") as counts:
        return one_step(switches, overrides) | {"by head": counts}


def step_in_two_parts(
    switches: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run :func:`one_step` with absorbed queries in two parts as on NPUs; also return how they arrived."""
    from mindspeed_dsa.features.dsa import core_attention, operands

    arrived = []

    def noting(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        parts = operands.parts_of(query, key, value)
        arrived.append(parts[1] is not None)
        return parts

    with (
        mock.patch.object(operands, "keeps_parts_apart", return_value=True),
        mock.patch.object(core_attention, "parts_of", noting),
    ):
        return one_step(switches, overrides) | {"in two parts": arrived}


def whole_step(switches: Mapping[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """Run :func:`job.run` with the same tie-breaking on both sides."""
    with ties_to_the_lowest():
        return job.run(switches, **arguments)


def step_with_split_down_projections(
    switches: Mapping[str, Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Run :func:`whole_step` on a spec that splits MLA's down-projections over tensor parallel ranks."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    name = "get_transformer_block_with_experimental_attention_variant_spec"
    original = getattr(specs, name)

    def block_spec(*args: Any, **kwargs: Any) -> Any:
        block = original(*args, **kwargs)
        for layer in block.layer_specs:
            attention = layer.submodules.self_attention.submodules
            # The local spec duplicates the down-projections.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = ColumnParallelLinear
        return block

    with mock.patch.object(specs, name, block_spec):
        return whole_step(switches, **arguments)


def warmup(
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    steps: int = 1,
    mtp: bool = False,
    **layout: Any,
) -> dict[str, Any]:
    """Take Adam steps of the warm-up stage with Megatron's schedule, DDP and optimizer."""
    job.start({"dsa_stage": "warmup", **(switches or {})}, **layout)
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    tp, pp, vpp = layout.get("tp", 1), layout.get("pp", 1), layout.get("vpp")
    cfg = job.config(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        **(overrides or {}),
    )
    cfg.finalize_model_grads_func = finalize_model_grads
    chunks = [job.gpt_model(cfg, vp_stage=stage if vpp else None, mtp=mtp) for stage in range(vpp or 1)]
    # Copies of the weights, to find the ones that the optimizer changes.
    before = [{name: p.detach().clone() for name, p in job.global_names(chunk).items()} for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = [
        DistributedDataParallel(cfg, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    adam = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(adam, wrapped)
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    # Two microbatches of two samples for this data parallel rank.
    microbatches = list(job.samples(4 * ranks).view(2, ranks, 2, -1)[:, rank])
    indexer_losses = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=lambda iterator, model: job.forward_step(cfg, iterator, model),
            data_iterator=[iter(microbatches) for _ in wrapped] if len(wrapped) > 1 else iter(microbatches),
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=len(microbatches),
            seq_length=job.SEQUENCE,
            micro_batch_size=2,
            forward_only=False,
        )
        # Later steps have other weights, hence gradients that cannot be compared.
        if step == 0:
            trained = [n for chunk in chunks for n, p in job.global_names(chunk).items() if p.requires_grad]
            gradients = {
                name: p.main_grad.detach().clone()
                for chunk in chunks
                for name, p in job.global_names(chunk).items()
                if p.requires_grad
            }
        optimizer.step()
        losses: dict[str, Tensor] = {}
        # Scaled by 1 / 2 for two microbatches.
        DSAIndexerLossLoggingHelper.track_indexer_metrics(0.5, step, None, total_loss_dict=losses)
        indexer_losses.append(float(losses["indexer loss"]))
    # Optimizer state exists only for trained parameters.
    states = [state for single in optimizer.chained_optimizers for state in single.optimizer.state.values()]
    return {
        "indexer losses": indexer_losses,
        "trained": trained,
        "gradients": gradients,
        "optimizer elements": sum(state["exp_avg"].numel() for state in states),
        "trained elements": sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad),
        "changed": [
            name
            for chunk, old in zip(chunks, before, strict=True)
            for name, p in job.global_names(chunk).items()
            if not torch.equal(p, old[name])
        ],
        "gradient buffers": sum(len(buffer.params) for chunk in wrapped for buffer in chunk.buffers),
    }


def warmup_with_recomputed_norms(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run layers that recompute their input norm, which Megatron only allows with Transformer Engine."""
    job.start({"dsa_stage": "warmup"})
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original = TransformerLayer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.recompute_input_layernorm = True

    with mock.patch.object(TransformerLayer, "__init__", __init__):
        model = job.gpt_model(job.config(**(overrides or {})))
    job.per_token_loss(model, job.samples(2)).mean().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def dense_attention_gradients(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return indexer gradients of Megatron's dense loss for a model with dense attention."""
    # With a topk as large as the sequence, Megatron's sparse attention is dense, so both stages are equal.
    whole = {"dsa_indexer_topk": job.SEQUENCE, "dsa_indexer_use_sparse_loss": False}
    return job.run(
        None, {**whole, **(overrides or {})}, num_microbatches=2, micro_batch_size=2, only="indexer"
    )


def saved_for_backward(stage: str, sequence: int) -> int:
    """Return the number of bytes that one forward saves for backward."""
    job.start({"dsa_stage": stage, "use_fused_dsa": True})
    with mock.patch.object(job, "SEQUENCE", sequence):
        model = job.gpt_model(job.config())
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            # Weights are not saved for backward in addition.
            if not isinstance(tensor, torch.nn.Parameter):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            loss = job.per_token_loss(model, job.samples(1)).mean()
        # Summed before backward frees the graph.
        total = sum(storages.values())
        loss.backward()
    return total


def operator_calls(mode: str, switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return call counts of the operators and of Megatron's functions in one step, and its loss.

    ``forms`` says for each layer's attention whether its operands were absorbed.
    """
    from mindspeed_dsa.features.dsa import core_attention, loss, main_attention, sparse_attention

    consumers = {
        "sparse_attention": core_attention,
        "lightning_indexer": sparse_attention,
        "sparse_flash_attention": main_attention,
        "indexer_kl_loss": loss,
        "dense_indexer_kl_loss": loss,
    }
    mocks = {name: mock.Mock(side_effect=getattr(module, name)) for name, module in consumers.items()}
    patches = [mock.patch.object(module, name, mocks[name]) for name, module in consumers.items()]
    for patch in patches:
        patch.start()
    try:
        result = one_step(switches, overrides, mode)
    finally:
        for patch in patches:
            patch.stop()
    calls = {name: called.call_count for name, called in mocks.items()}
    # Whether the problem passed to each layer's attention is absorbed.
    forms = [call.args[0].operands.absorbed for call in mocks["sparse_attention"].call_args_list]
    return {**result, "counts": {**result["counts"], **calls}, "forms": forms}


def with_an_adapter() -> None:
    """Add a parameter to the up-projection, which absorption would leave out."""
    job.start({"use_fused_dsa": True})
    model = job.gpt_model(job.config())
    layer = model.decoder.layers[0].self_attention.linear_kv_up_proj
    layer.register_parameter("adapter", torch.nn.Parameter(torch.ones(2)))
    job.per_token_loss(model, job.samples(1))


class Quantised(torch.nn.Parameter):
    """Stand-in for the parameter subclasses of Transformer Engine's fp8 weights."""


def with_quantised_weights() -> None:
    job.start({"use_fused_dsa": True})
    model = job.gpt_model(job.config())
    layer = model.decoder.layers[0].self_attention.linear_kv_up_proj
    layer.weight = Quantised(layer.weight.data)
    job.per_token_loss(model, job.samples(1))


def decoding() -> None:
    """Attend with one query token to a longer cache."""
    job.start({"use_fused_dsa": True})
    from megatron.core.transformer.enums import AttnMaskType

    attention = job.gpt_model(job.config()).decoder.layers[0].self_attention.core_attention
    # One query token, five cached keys.
    query, key, value = torch.zeros(1, 1, 4, 16), torch.zeros(5, 1, 4, 16), torch.zeros(5, 1, 4, 8)
    x, qr = torch.zeros(1, 1, 32), torch.zeros(1, 1, 24)
    attention(query, key, value, None, x, qr, attn_mask_type=AttnMaskType.no_mask)


def frozen_indexer(switches: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the logged loss and all gradients of a model with frozen indexers."""
    job.start(switches)
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    model = job.gpt_model(job.config())
    for name, parameter in model.named_parameters():
        # All other weights stay trainable.
        parameter.requires_grad_("indexer" not in name)
    with ties_to_the_lowest():
        job.per_token_loss(model, job.samples(2)).mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"tracked": DSAIndexerLossLoggingHelper.tracker["values"].clone(), "gradients": gradients}


def hooks_of_the_up_projection() -> list[int]:
    """Return how often plain and keyword forward pre-hooks of the up-projection run in one forward."""
    job.start({"use_fused_dsa": True})
    model = job.gpt_model(job.config(num_layers=1, moe_layer_freq=[1]))
    layer = model.decoder.layers[0].self_attention.linear_kv_up_proj
    plain, with_keywords = mock.Mock(return_value=None), mock.Mock(return_value=None)
    layer.register_forward_pre_hook(plain)
    layer.register_forward_pre_hook(with_keywords, with_kwargs=True)
    job.per_token_loss(model, job.samples(1))
    return [plain.call_count, with_keywords.call_count]


def packed() -> None:
    """Pass packed sequences to DSA's attention."""
    job.start({"use_fused_dsa": True, "use_dsa_absorb": False})
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    attention = job.gpt_model(job.config()).decoder.layers[0].self_attention.core_attention
    query = torch.zeros(4, 1, 4, 16)
    attention(
        query,
        query,
        torch.zeros(4, 1, 4, 8),
        None,
        torch.zeros(4, 1, 32),
        torch.zeros(4, 1, 24),
        attn_mask_type=AttnMaskType.causal,
        packed_seq_params=PackedSeqParams(qkv_format="thd"),
    )


def mtp_step(switches: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Return the gradients of a model with two MTP layers."""
    job.start(switches)
    cfg = job.config(mtp_num_layers=2)
    model = job.gpt_model(cfg, mtp=True)
    with ties_to_the_lowest():
        job.train_step(cfg, [model], [job.samples(2)])
    return job.gradients([model])
