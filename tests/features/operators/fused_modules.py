"""Worker functions: fused operators in Megatron's modules, and the modules without them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.ops.small_cases import Dispatched
from tests.support import memory_events, model

ALL = {"fused_operators": ["all"]}


def switch_on(switches: Mapping[str, Any]) -> None:
    """Turn features on; the process groups exist already."""
    import mindspeed_dsa

    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**model.DSA_ON, **switches)


def beside_stock(
    runs: Mapping[str, Mapping[str, Any]], operators: Sequence[str] = ("all",), **layout: int
) -> dict[str, Any]:
    """Run a step of the tiny model with and without the operators; also return event counts.

    Args:
        runs: dict from name to ``switches`` of other features and config ``overrides``.
        operators: names of the fused operators.
        **layout: arguments of :func:`model.start`.
    """
    model.start(**layout)
    results: dict[str, Any] = {}
    for name, case in runs.items():
        results[name] = {}
        for side, fused in (("theirs", {}), ("ours", {"fused_operators": list(operators)})):
            switch_on({**case.get("switches", {}), **fused})
            # The groups exist already, so `start` must not make them again.
            with memory_events.counted() as counts, mock.patch.object(model, "start"):
                result = model.run(overrides=case.get("overrides"), num_microbatches=2, **layout)
            results[name][side] = {**result, "counts": dict(counts)}
    return results


def consumers() -> dict[str, Any]:
    """Return the functions that Megatron's modules call and build, with all operators and after them."""
    import mindspeed_dsa

    model.start(ALL)
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe import shared_experts
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def homes() -> list[str]:
        return [
            function.__module__ if not hasattr(function, "__code__") else function.__code__.co_filename
            for function in (
                mlp.bias_swiglu_impl,
                mlp.weighted_bias_swiglu_impl,
                shared_experts.bias_swiglu_impl,
                rope_utils._apply_rotary_pos_emb_bshd,
                mlp.MLP.forward,
                layers.VocabParallelEmbedding.forward,
            )
        ]

    cfg = model.config(sequence_parallel=False, layernorm_zero_centered_gamma=True)
    norm = WrappedTorchNorm(config=cfg, hidden_size=8, eps=1e-5)
    result = {"with": homes(), "norm": type(norm).__name__, "state": list(norm.state_dict())}
    result["zero centered"] = norm.weight.tolist()
    # Megatron reduces gradients of weights with this mark over the tensor parallel group.
    result["sequence parallel"] = norm.weight.sequence_parallel
    mindspeed_dsa.disable()
    result["after"] = homes()
    return result


def experts() -> dict[str, Any]:
    """Run experts together and one by one; return activations, linear layer calls, results and gradients."""
    model.start({"fused_operators": ["swiglu"]})
    from megatron.core.tensor_parallel import layers

    from mindspeed_dsa.features.operators.fused import functions as together

    module = model.gpt_model(model.config()).decoder.layers[-1].mlp.experts
    generator = torch.Generator().manual_seed(1)
    counts, results = torch.tensor([3, 0, 5, 1]), {}
    states, scales = torch.randn(9, 32, generator=generator), torch.rand(9, generator=generator)
    # With a hook, experts have to run one by one.
    hooks = {"none": None, "on a linear layer": module.local_experts[1].linear_fc2}
    hooks["on an expert"] = module.local_experts[1]
    for name, hooked in {**hooks, "apart": None}.items():
        handle = hooked.register_forward_hook(lambda *_: None) if hooked is not None else None
        module.zero_grad()
        inputs = states.clone().requires_grad_(), scales.clone().requires_grad_()
        apart = mock.patch.object(together, "_can_be_one", return_value=False)
        linear = layers.linear_with_grad_accumulation_and_async_allreduce
        with (
            apart if name == "apart" else nullcontext(),
            memory_events.counted() as seen,
            mock.patch.object(
                layers, "linear_with_grad_accumulation_and_async_allreduce", wraps=linear
            ) as called,
        ):
            output, _ = module(inputs[0], counts, inputs[1])
            output.square().sum().backward()
        if handle is not None:
            handle.remove()
        results[name] = {
            "activations": seen[memory_events.FUSED_OPERATORS["swiglu"]],
            "linear layers": called.call_count,
            "tensors": [output.detach(), *(each.grad for each in (*inputs, *module.parameters()))],
        }
    return results


def experts_that_differ() -> dict[str, list[list[Tensor]]]:
    """Return results and gradients of experts that are not one SwiGLU, with the feature and one by one."""
    model.start({"fused_operators": ["swiglu"]})
    from megatron.core.transformer.mlp import MLP

    from mindspeed_dsa.features.operators.fused import functions as together

    class Adapted(MLP):
        def forward(self, rows: Tensor, scale: Tensor | None = None) -> Any:
            output, bias = MLP.forward(self, rows, scale)
            return output + rows, bias

    generator = torch.Generator().manual_seed(1)
    states, scales = torch.randn(9, 32, generator=generator), torch.rand(9, generator=generator)
    results: dict[str, list[list[Tensor]]] = {}
    kinds: dict[str, Any] = {"a class of its own": F.silu, "GELU": F.gelu}
    for name, activation in kinds.items():
        module = model.gpt_model(model.config(activation_func=activation)).decoder.layers[-1].mlp.experts
        if name == "a class of its own":
            module.local_experts[1].__class__ = Adapted
        for apart in (nullcontext(), mock.patch.object(together, "_can_be_one", return_value=False)):
            module.zero_grad()
            inputs = states.clone().requires_grad_(), scales.clone().requires_grad_()
            with apart:
                output, _ = module(inputs[0], torch.tensor([2, 2, 4, 1]), inputs[1])
            output.square().sum().backward()
            tensors = [output.detach(), *(each.grad for each in (*inputs, *module.parameters()))]
            results.setdefault(name, []).append(tensors)
    return results


def packs() -> dict[str, Any]:
    """Return latent and plain rotations of packed documents, by a sequence's angles and by the pack's."""
    model.start()
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    ends = torch.tensor([0, 5, 12, 20], dtype=torch.int32)
    half = torch.randn(20, 1, 1, 4, generator=torch.Generator().manual_seed(1))
    angles = torch.cat((half, half), -1)

    def run() -> dict[str, Tensor]:
        results = {}
        for latent in (False, True):
            # Angles of one sequence begin anew in each document; the pack's have a row for each token.
            for of, angles_given in (("a sequence", angles[:8]), ("the pack", angles)):
                for scale in (1.0, 1.37):
                    cfg = SimpleNamespace(
                        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=latent
                    )
                    tensor = torch.randn(20, 3, 8, generator=torch.Generator().manual_seed(2))
                    tensor.requires_grad_()
                    out = apply_rotary_pos_emb(tensor, angles_given, cfg, ends, scale, dist.group.WORLD)
                    out.square().sum().backward()
                    results[f"{latent}, {of}, {scale}"] = torch.stack((out.detach(), tensor.grad))
        return results

    theirs = run()
    switch_on(ALL)
    with memory_events.counted() as counts:
        ours = run()
    return {"ours": ours, "theirs": theirs, "counts": dict(counts)}


def vocabulary() -> dict[str, Any]:
    """Return embeddings and cross entropy of a split vocabulary, with weights and logits that are not
    finite.
    """
    model.start(tp=2)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    cfg = model.config(tensor_model_parallel_size=2)
    tokens = torch.tensor([[0, 3, 9, 15, 8], [7, 8, 1, 14, 0]])

    def run() -> dict[str, Any]:
        results: dict[str, Any] = {}
        with Dispatched() as seen:
            for deterministic in (False, True):
                cfg.deterministic_mode = deterministic
                for scatter in (False, True):
                    embedding = VocabParallelEmbedding(
                        16, 4, init_method=torch.nn.init.ones_, reduce_scatter_embeddings=scatter, config=cfg
                    )
                    generator = torch.Generator().manual_seed(dist.get_rank())
                    with torch.no_grad():
                        embedding.weight.copy_(torch.randn(8, 4, generator=generator))
                        # Masked tokens look up row 0.
                        embedding.weight[0] = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
                    token_ids = tokens if not scatter else tokens[:, :4]
                    out = embedding(token_ids)
                    out.backward(torch.ones_like(out))
                    results[f"embedding {deterministic} {scatter}"] = [out.detach(), embedding.weight.grad]
            for smoothing in (0.0, 0.1):
                generator = torch.Generator().manual_seed(5 + dist.get_rank())
                logits = torch.randn(2, 5, 8, generator=generator)
                if not smoothing:
                    logits[..., 0] = -math.inf  # masked targets look up this entry
                    logits[0, 0, 0] = logits[1, 4, 0] = 0.5  # logit of token 0 itself, on rank 0
                    logits[0, 4, 0] = logits[1, 1, 0] = 0.5  # logit of token 8, on rank 1
                logits.requires_grad_()
                # A copy, because the operation works in place.
                loss = vocab_parallel_cross_entropy(logits * 1.0, tokens, smoothing)
                loss.sum().backward()
                results[f"loss {smoothing}"] = [loss.detach(), logits.grad]
        results["dispatched"] = seen.names
        return results

    theirs = run()
    switch_on({"fused_operators": ["mask-arithmetic"]})
    return {"ours": run(), "theirs": theirs}


def pair(switches: Mapping[str, Any], precision: str = "bf16") -> dict[str, Any]:
    """Train ten steps of the tiny model with an optimizer; also return event counts."""
    from tests.support.optimizer_job import train

    with memory_events.counted() as counts:
        result = train(switches=switches, distributed=True, precision=precision)
    return {**result, "counts": dict(counts)}
