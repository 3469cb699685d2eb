"""Worker functions: gradients, calls and saved tensors of one DSA core attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import model as job
from tests.support.counting import counted


def one_step(
    overrides: Mapping[str, Any], switches: Mapping[str, Any] | None = None, mode: str = "train"
) -> dict[str, Any]:
    """Run forward and backward of one microbatch without a schedule; return results and call counts."""
    job.start(switches)
    from megatron.core.transformer.experimental_attention_variant import dsa

    model = job.gpt_model(job.config(**overrides))
    model.train(mode == "train")
    saved: list[Tensor] = []
    names = ("compute_dsa_indexer_loss", "unfused_dsa_fn", "rotate_activation")
    with counted(dsa, *names) as counts, torch.set_grad_enabled(mode != "no_grad"):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            loss = job.per_token_loss(model, job.samples(2)).mean()
        if mode != "no_grad":
            loss.backward()
    # Score matrices have two axes of sequence length.
    scores = [tensor for tensor in saved if list(tensor.shape).count(job.SEQUENCE) == 2]
    tracker = dsa.DSAIndexerLossLoggingHelper.tracker.get("values")
    return {
        "loss": loss.item(),
        "counts": counts,
        "score matrices kept": len(scores),
        "tracked": None if tracker is None else tracker.clone(),
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
    }


def scores_alone(mode: str, switches: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return gradients of an indexer whose scores are requested outside of attention, without an indexer
    loss.
    """
    job.start(switches)
    cfg = job.config(dsa_indexer_loss_coeff=None)
    indexer = job.gpt_model(cfg).decoder.layers[0].self_attention.core_attention.indexer
    indexer.train(mode == "train")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(job.SEQUENCE, 2, cfg.hidden_size, generator=generator)
    qr = torch.randn(job.SEQUENCE, 2, cfg.q_lora_rank, generator=generator)
    scores, _ = indexer.forward_with_scores(x, qr)
    if scores.requires_grad:
        scores.sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in indexer.named_parameters()}


def overlapped_step(coefficient: float | None, switches: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run a data parallel step whose gradient reduction overlaps backward."""
    return job.run(
        switches,
        {"dsa_indexer_loss_coeff": coefficient},
        num_microbatches=2,
        # Small buckets, so that reductions start during backward.
        micro_batch_size=1,
        ddp={"overlap_grad_reduce": True, "bucket_size": 4000},
    )


def track(losses: list[list[tuple[int, float]]], num_layers: int, pp: int) -> dict[str, Any]:
    """Report ``losses[rank]`` as ``(layer, loss)``, log the step, and return this rank's results."""
    job.start(pp=pp)
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper as helper,
    )

    for layer, loss in losses[dist.get_rank()]:
        helper.save_loss_to_tracker(torch.tensor(loss), layer, num_layers)
    written: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, name: str, value: Tensor, iteration: int) -> None:
            written.append((name, float(value), iteration))

    # Two microbatches: half of each sum.
    totals: dict[str, Tensor] = {}
    helper.track_indexer_metrics(0.5, 7, Writer(), total_loss_dict=totals, per_layer_logging=True)
    after = {
        name: helper.tracker[name].sum().item() for name in ("values", "reported") if name in helper.tracker
    }
    # A second log without losses must not repeat the first one's.
    helper.track_indexer_metrics(0.5, 8, None, total_loss_dict=totals)
    return {
        "written": written,
        "totals": {name: float(value) for name, value in totals.items()},
        "after": after,
    }


def tracked_over_groups() -> float:
    """Return the logged loss after both ranks have reported a part of it to an averaging group."""
    job.start()
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper as helper,
    )

    # 1 on rank 0 and 2 on rank 1, averaged to 1.5.
    helper.save_loss_to_tracker(
        torch.tensor(1.0 + dist.get_rank()), 1, 1, avg_group=dist.group.WORLD, reduce_group=None
    )
    totals: dict[str, Tensor] = {}
    helper.track_indexer_metrics(1.0, 1, None, total_loss_dict=totals)
    return float(totals["indexer loss"])


def track_on_another_device(switches: Mapping[str, Any] | None = None) -> str:
    """Return the tracker's device if the loss is on another device than the current one."""
    job.start(switches)
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper as helper,
    )

    helper.save_loss_to_tracker(torch.ones((), device="meta"), 1, 2)
    return str(helper.tracker["values"].device)


def indexer_rotary(seed: int, switches: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return input, output ``[seq, batch, heads, dim]`` and angles of the indexer's rotary embedding."""
    job.start(switches)
    cfg = job.config(dsa_indexer_head_dim=16, qk_pos_emb_head_dim=8)
    indexer = job.gpt_model(cfg).decoder.layers[0].self_attention.core_attention.indexer
    x = torch.randn(job.SEQUENCE, 2, 4, 16, generator=torch.Generator().manual_seed(seed))
    angles = indexer.rotary_pos_emb(job.SEQUENCE)
    return {"input": x, "output": indexer._apply_rope(x, angles, 1.0)}


def indexer_input(
    switches: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Return the latent query passed to layer 0's indexer, and the tensors it is computed from."""
    job.start(switches)
    cfg = job.config(**(overrides or {}))
    model = job.gpt_model(cfg)
    attention = model.decoder.layers[0].self_attention
    seen: dict[str, Tensor] = {}
    forward = attention.core_attention.forward

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen["qr"] = kwargs["qr"].detach()
        return forward(*args, **kwargs)

    attention.core_attention.forward = watch
    attention.linear_q_down_proj.register_forward_hook(
        lambda m, i, out: seen.__setitem__("latent", out[0].detach())
        # Recorded before the norm that the up-projection holds.
    )
    loss = job.per_token_loss(model, job.samples(2)).mean()
    loss.backward()
    parameters = dict(attention.linear_q_up_proj.named_parameters())
    return {
        **seen,
        "weight": parameters["layer_norm_weight"].detach(),
        "gradient": parameters["layer_norm_weight"].grad,
        "bias": parameters.get("layer_norm_bias"),
    }
