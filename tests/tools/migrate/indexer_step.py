"""A DSA model from a translated command line, observed during a step; runs in the pool's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.support import model as job


def one_step(switches: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return one layer's tensors in a training step: indexer's parameters, scores, loss and magnitudes.

    Returns:
        ``x``, ``latent`` and ``qr`` ``[seq, batch, *]``, ``query`` and ``key`` ``[seq, batch, heads, dim]``,
        ``scores`` and ``topk`` ``[batch, seq, *]``, the indexer's ``loss`` and its other inputs.
    """
    job.start(switches)
    from megatron.core.transformer.experimental_attention_variant import dsa

    model = job.gpt_model(job.config(num_layers=1, moe_layer_freq=[0], **overrides))
    attention = model.decoder.layers[0].self_attention
    core, seen = attention.core_attention, {}
    forward = core.forward

    def watch(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.update(query=query.detach(), key=key.detach(), x=kwargs["x"].detach(), qr=kwargs["qr"].detach())
        return forward(query, key, value, *args, **kwargs)

    core.forward = watch
    attention.linear_q_down_proj.register_forward_hook(
        lambda module, given, made: seen.__setitem__("latent", made[0].detach())
    )
    with torch.no_grad():  # a norm other than the identity
        norm = attention.linear_q_up_proj.layer_norm_weight
        norm.copy_(torch.linspace(0.5, 2, norm.numel()))
        bias = core.indexer.k_norm.bias
        bias.copy_(torch.linspace(-1, 1, bias.numel()))
    job.per_token_loss(model, job.samples(2)).mean().backward()
    tracked = dsa.DSAIndexerLossLoggingHelper.tracker["values"][0].item()
    scores, topk = core.indexer.forward_with_scores(seen["x"], seen["qr"])
    return {
        **seen,
        "scores": scores.detach(),
        "topk": topk,
        "loss": tracked,
        "norm": norm.detach(),
        "parameters": {name: each.detach() for name, each in core.indexer.named_parameters()},
        "softmax_scale": attention.softmax_scale,
        "magnitude": attention.rotary_pos_emb(2)[1] if attention.config.rope_type == "yarn" else 1.0,
    }


def main_rotary(size: int) -> dict[str, Tensor]:
    """Return two tensors ``[seq, 1, 1, size]`` before and after Megatron's rotary embedding of MLA."""
    job.start()
    from megatron.core.models.common.embeddings import apply_rotary_pos_emb

    angles = torch.arange(5.0)[:, None] * 100.0 ** (-torch.arange(0, size, 2) / size)
    angles = angles.repeat(1, 2)[:, None, None]
    pair = torch.randn(2, 5, 1, 1, size, generator=torch.Generator().manual_seed(3))
    turned = [apply_rotary_pos_emb(each, angles, config=job.config()) for each in pair]
    return {"before": pair, "after": torch.stack(turned), "angles": angles}
