"""Cases that run inside the worker pool for test_kernel_backend."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.features.dsa import cp_cases
from tests.support import model as job

HOOKS = (
    "run_fused_dsa_attention",
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
    "run_fused_absorbed_sparse_attention",
)
# With few index heads exact ties are common, and torch.topk breaks them differently.
FEW_TIES = {"dsa_indexer_n_heads": 16}


def hooks(switches: Mapping[str, Any]) -> ModuleType:
    """Return the module whose kernel hooks Megatron calls with these switches."""
    from mindspeed_dsa import session
    from mindspeed_dsa.features.dsa.kernel_hooks.feature import Options
    from mindspeed_dsa.features.dsa.kernel_hooks.hooks import backend_module

    settings, _ = session.resolve(switches, ())
    return backend_module(Options.of(settings))


def step(
    switches: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None, **layout: Any
) -> dict[str, Any]:
    """Run a training step, and count the calls that each hook took over (returned not None)."""
    kernel_backend = hooks({**job.DSA_ON, **(switches or {})})
    taken = dict.fromkeys(HOOKS, 0)
    originals = {name: getattr(kernel_backend, name) for name in HOOKS}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = originals[name](*args, **kwargs)
            taken[name] += result is not None
            return result

        return call

    for name in HOOKS:
        setattr(kernel_backend, name, counting(name))
    try:
        result = job.run(switches, {**FEW_TIES, **(overrides or {})}, num_microbatches=2, **layout)
    finally:
        for name, original in originals.items():
            setattr(kernel_backend, name, original)
    return {**result, "taken": taken}


def step_in_parts(**arguments: Any) -> dict[str, Any]:
    """Run :func:`step` with queries in two parts; add the query widths that attention received."""
    from mindspeed_dsa.features.dsa import core_attention

    widths: list[int] = []
    attend = core_attention.Operands

    def noting(query: torch.Tensor, *rest: Any, **more: Any) -> Any:
        widths.append(query.shape[-1])
        return attend(query, *rest, **more)

    with cp_cases.parts_kept_apart(), mock.patch.object(core_attention, "Operands", noting):
        return {**step(**arguments), "widths": widths}


def context_parallel_training_in_parts(**arguments: Any) -> dict[str, Any]:
    """Run :func:`context_parallel_training` with keys in two parts."""
    with cp_cases.parts_kept_apart():
        return context_parallel_training(**arguments)


def context_parallel_step(switches: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return loss and gradients of one of two context parallel ranks with zigzag shards."""
    import mindspeed_dsa

    mindspeed_dsa.enable(**job.DSA_ON, **(switches or {}))
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    cfg = job.config(**FEW_TIES, context_parallel_size=2, cp_comm_type="allgather")
    model = job.gpt_model(cfg)
    tokens, rank, part = job.samples(2), parallel_state.get_context_parallel_rank(), job.SEQUENCE // 4
    mine = torch.cat([torch.arange(part) + chunk * part for chunk in (rank, 3 - rank)])
    losses = model(tokens[:, mine], mine.expand(2, -1), None, labels=tokens[:, mine + 1].contiguous())
    losses.mean().backward()
    return {
        "loss": losses.mean().item(),
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


def context_parallel_training(
    cp: int,
    switches: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
    **layout: Any,
) -> dict[str, Any]:
    """Run :func:`step` on context parallel ranks.

    Adds the logged indexer loss, the gathers with their widths, and the rank's context parallel index.
    """
    from mindspeed_dsa.context_parallel.gather import _Transfer

    gathers: list[str] = []
    start, take = _Transfer.start, _Transfer.hand_out

    def starting(self: Any, local: torch.Tensor) -> None:
        gathers.append(f"start {local.shape[-1]}")
        start(self, local)

    def taking(self: Any) -> torch.Tensor:
        gathers.append(f"take {self.local.shape[-1]}")
        return take(self)

    parallel = {"context_parallel_size": cp, "cp_comm_type": "allgather"}
    told = mock.patch.multiple(_Transfer, start=starting, hand_out=taking)
    with mock.patch.object(job, "SEQUENCE", cp_cases.SEQUENCE), told:
        overrides = {**parallel, **(overrides or {})}
        result = step(switches, overrides, cp=cp, ddp=ddp, micro_batch_size=2, **layout)
    from megatron.core import parallel_state

    return {
        **result,
        "indexer loss": cp_cases.logged_indexer_loss(2),
        "gathers": gathers,
        "context": parallel_state.get_context_parallel_rank(),
    }


def packed(sparse_loss: bool) -> dict[str, Any]:
    """Run two packed sequences through the whole hook, and each sequence separately."""
    job.start({"use_fused_dsa": True})
    from megatron.core.transformer.enums import AttnMaskType

    run_fused_dsa_attention = hooks({"use_fused_dsa": True}).run_fused_dsa_attention

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    heads, latent, rope, index_heads, index_dim = 3, 16, 8, 16, 8
    lengths = (9, 14)
    total = sum(lengths)
    leaves = {
        "query": random(total, 1, heads, latent + rope),
        "key": random(total, 1, 1, latent + rope),
        "up_v_weight": random(heads, 5, latent),
        "q_indexer": random(total, 1, index_heads, index_dim),
        "k_indexer": random(total, 1, index_dim),
        "indexer_weights": random(total, 1, index_heads),
    }
    common = {
        "value": None,
        "indexer_topk": 4,
        "softmax_scale": 0.2,
        "loss_coeff": 1.0,
        "sparse_loss": sparse_loss,
        "calculate_per_token_loss": True,
        "absorbed_mla": True,
        "attn_mask_type": AttnMaskType.causal,
        "key_positions": None,
        "query_valid_rows": None,
        "use_relu": True,
    }
    starts = torch.cat([torch.zeros(lengths[0]), torch.full((lengths[1],), lengths[0])]).int()
    output, loss = run_fused_dsa_attention(
        **leaves, **common, varlen_starts=starts, varlen_ends=torch.arange(1, total + 1).int()
    )
    (output.square().sum() + loss).backward()
    whole = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    outputs, losses = [], 0.0
    for part in (slice(0, lengths[0]), slice(lengths[0], total)):
        own = {name: leaf if name == "up_v_weight" else leaf[part] for name, leaf in leaves.items()}
        part_output, part_loss = run_fused_dsa_attention(
            **own, **common, varlen_starts=None, varlen_ends=None
        )
        (part_output.square().sum() + part_loss).backward()
        outputs.append(part_output.detach())
        losses += float(part_loss)
    return {
        "output": (output.detach(), torch.cat(outputs)),
        "loss": (float(loss), losses),
        "gradients": {name: (whole[name], leaf.grad) for name, leaf in leaves.items()},
    }


def valid_rows() -> tuple[float, float]:
    """Return the sparse loss with masked padding rows, and the loss of the rows before them."""
    job.start({"use_fused_dsa": True})
    run_fused_qk_topk_with_loss = hooks({"use_fused_dsa": True}).run_fused_qk_topk_with_loss

    torch.manual_seed(0)
    length, counted = 12, 8
    q, k, weights = torch.randn(length, 2, 16, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 16)
    query, key = torch.randn(length, 2, 3, 24), torch.randn(length, 2, 1, 24)
    losses = []
    for rows, mask in ((length, torch.arange(length) < counted), (counted, None)):
        result = run_fused_qk_topk_with_loss(
            q[:rows],
            k[:rows],
            weights[:rows],
            4,
            torch.zeros(rows, dtype=torch.int32),
            torch.arange(1, rows + 1, dtype=torch.int32),
            8192,
            query=query[:rows],
            key=key[:rows],
            softmax_scale=0.2,
            loss_coeff=0.5,
            pg_collection=SimpleNamespace(tp=None),
            query_valid_rows=None if mask is None else mask.expand(2, -1),
        )
        assert result is not None
        losses.append(float(result[2]))
    return losses[0], losses[1]


def valid_rows_on_two_ranks(counted: int) -> dict[str, Any]:
    """Return the sparse loss of a padded row split over two ranks, and of the whole row on one rank."""
    job.start({"use_fused_dsa": True}, cp=2)
    run_fused_qk_topk_with_loss = hooks({"use_fused_dsa": True}).run_fused_qk_topk_with_loss

    torch.manual_seed(0)
    length, rank = 12, dist.get_rank()
    q, k, weights = torch.randn(length, 2, 16, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 16)
    query, key = torch.randn(length, 2, 3, 24), torch.randn(length, 2, 1, 24)
    valid, ends = torch.arange(length) < counted, torch.arange(1, length + 1, dtype=torch.int32)
    results = []
    for rows, cp in ((slice(6 * rank, 6 * rank + 6), dist.group.WORLD), (slice(0, length), None)):
        leaf = q.clone().requires_grad_()
        result = run_fused_qk_topk_with_loss(
            leaf[rows],
            k,
            weights[rows],
            4,
            torch.zeros_like(ends[rows]),
            ends[rows],
            8192,
            query=query[rows],
            key=key,
            softmax_scale=0.2,
            loss_coeff=0.5,
            pg_collection=SimpleNamespace(tp=None, cp=cp),
            query_valid_rows=valid[rows].expand(2, -1),
        )
        assert result is not None
        result[2].backward()
        results.append((float(result[2]), leaf.grad))
    (mine, gradient), (whole, expected) = results
    shard = slice(6 * rank, 6 * rank + 6)
    return {"loss": mine, "whole": whole, "gradients": (gradient[shard], expected[shard])}


def topk_length_cuts() -> tuple[torch.Tensor, ...]:
    """Run attention with the entries past ``topk_length`` valid, at -1, and out of range."""
    job.start({"use_fused_dsa": True})
    run_fused_absorbed_sparse_attention = hooks({"use_fused_dsa": True}).run_fused_absorbed_sparse_attention

    torch.manual_seed(0)
    query, key = torch.randn(6, 1, 3, 24), torch.randn(6, 1, 1, 24)
    indices = torch.arange(4).expand(1, 6, 4)
    length = torch.tensor([[1, 2, 3, 4, 4, 2]])
    past = torch.arange(4) >= length[..., None]
    cut, beyond = indices.masked_fill(past, -1), indices.masked_fill(past, 2**32)
    return (
        run_fused_absorbed_sparse_attention(query, key, indices, 0.2, 16, length),
        run_fused_absorbed_sparse_attention(query, key, cut, 0.2, 16),
        run_fused_absorbed_sparse_attention(query, key, beyond, 0.2, 16),
    )


def chosen_backend(switches: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> str:
    job.start(switches)
    return str(job.config(**(overrides or {})).dsa_kernel_backend)


def flag_choices() -> list[str]:
    """Return the choices that Megatron-LM's argument factory offers for --dsa-kernel-backend."""
    import dataclasses
    import typing

    job.start({"use_fused_dsa": True})
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    (field,) = (f for f in dataclasses.fields(MLATransformerConfig) if f.name == "dsa_kernel_backend")
    return list(typing.get_args(field.type))
