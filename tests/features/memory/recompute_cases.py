"""Worker functions: steps with recomputed outputs, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory.measure import allocations
from tests.support import model as job

PLAIN = {  # a stock GPT without DeepSeek's attention and experts
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "qk_layernorm": False,
}
EXPERTS = {
    **PLAIN,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 24,
}


def drawing(x: Tensor) -> Tensor:
    """Activation function that draws random numbers."""
    return F.gelu(F.dropout(x, 0.3, training=True))


def identity(x: Tensor) -> Tensor:
    """Activation function that returns its input."""
    return x


def part(x: Tensor) -> Tensor:
    """Activation function whose output is a view of a larger tensor."""
    return torch.cat([F.gelu(x), x])[: len(x)]


class Drifting:
    """Activation function whose second call on the same input has another result."""

    def __init__(self, by: float) -> None:
        self._calls, self._by = 0, by

    def __call__(self, x: Tensor) -> Tensor:
        self._calls += 1
        result = F.gelu(x)
        # Only the last row differs, so that the check has to compare all values.
        return result if self._calls == 1 else torch.cat([result[:-1], result[-1:] + self._by])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "drawing": drawing,
    "identity": identity,
    "part": part,
}


def built(
    overrides: Mapping[str, Any], activation: str = "silu", mtp: bool = False, stages: int = 1, **layout: Any
) -> tuple[Any, list[Any]]:
    """Return the config and this rank's chunks, with weights that depend only on their names."""
    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    cfg = job.config(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=stages if stages > 1 else None,
        **{"activation_func": ACTIVATIONS[activation], "mtp_num_layers": 1 if mtp else None, **overrides},
    )
    if cfg.multi_latent_attention:
        make: Callable[[int | None], Any] = lambda stage: job.gpt_model(cfg, vp_stage=stage, mtp=mtp)  # noqa: E731
    else:
        make = lambda stage: stock_gpt(cfg, stage)  # noqa: E731
    return cfg, [make(stage if stages > 1 else None) for stage in range(stages)]


def stock_gpt(cfg: Any, stage: int | None) -> Any:
    """Return a GPT with multi-head attention, and with dense MLPs or experts in every layer."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    model = GPTModel(
        config=cfg,
        transformer_layer_spec=gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=cfg.num_moe_experts, normalization=cfg.normalization
        ),
        **job.ends(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )
    # Weights depend on names only, so all layouts start equal.
    job.fill_by_name(model)
    return model


def train(
    switches: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    activation: str = "silu",
    mtp: bool = False,
    frozen: str = "",
    num_microbatches: int = 3,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
) -> dict[str, Any]:
    """Take a step of several microbatches with Megatron's schedule.

    Returns:
        losses, gradients by name, random states after the step, and counts of activation calls, discarded
        outputs and restored random states.
    """
    job.start(switches, tp=tp, pp=pp, vpp=vpp)
    cfg, chunks = built(overrides or {}, activation, mtp, stages=vpp or 1, tp=tp, pp=pp)
    for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
        parameter.requires_grad_(not frozen or frozen not in name)
    with watched() as counts:
        losses = job.train_step(cfg, chunks, list(job.samples(2 * num_microbatches).split(2)))
    return {
        "losses": [entry["lm loss"] for entry in losses],
        "gradients": {
            f"{index}.{name}": parameter.main_grad.clone()
            for index, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        },
        "random state": torch.get_rng_state(),
        **counts,
    }


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Count freed outputs and restored random states."""
    from megatron.core.tensor_parallel import random

    counts = {"discarded": 0, "restored": 0}
    resize, restore = torch.UntypedStorage.resize_, random._set_all_rng_states

    def counting_resize(self: Any, size: int) -> Any:
        # A storage of size 0 is a discarded output.
        counts["discarded"] += size == 0
        return resize(self, size)

    def counting_restore(*states: Any) -> Any:
        counts["restored"] += 1
        return restore(*states)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", counting_resize),
        mock.patch.object(random, "_set_all_rng_states", counting_restore),
    ):
        yield counts


def kept_bytes(
    switches: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, activation: str = "silu"
) -> dict[str, int]:
    """Return the bytes held after one forward, and the peak of forward and backward.

    Returns:
        ``forward``: bytes held once the loss is computed.
        ``peak``: most bytes held in forward and backward.
    """
    job.start(switches)
    _, (model,) = built(overrides or {}, activation)
    tokens = job.samples(4)
    # The first pass allocates gradients and buffers. The profiler reports releases by address, and keeps
    # unreleased allocations in its list, so everything released in a block must be allocated in that block.
    with allocations([0]):
        job.per_token_loss(model, tokens).sum().backward()
    held: list[int] = [0]
    with allocations(held):
        loss = job.per_token_loss(model, tokens).sum()
    forward = held[-1]
    with allocations(held):
        loss.backward()
    return {"forward": forward, "peak": max(held)}


def drift(switches: Mapping[str, Any], by: float) -> float:
    """Take a step with one MLP whose recomputed activation differs from the first result."""
    job.start(switches)
    _, (model,) = built(
        {**PLAIN, "gated_linear_unit": False, "num_layers": 1, "activation_func": Drifting(by)}
    )
    loss = job.per_token_loss(model, job.samples(2)).sum()
    loss.backward()
    return float(loss)


def without_gradients(switches: Mapping[str, Any]) -> dict[str, int]:
    """Run two forwards without backward: under no_grad, and with all parameters frozen."""
    job.start(switches)
    _, (model,) = built(PLAIN)
    with watched() as counts:
        with torch.no_grad():
            job.per_token_loss(model.eval(), job.samples(2))
        job.per_token_loss(model.requires_grad_(False), job.samples(2))
    return counts


def checkpoints_on(switches: Mapping[str, Any]) -> list[str]:
    """Return the features that change Megatron's output recomputation, with all patches in place."""
    job.start(switches)
    from mindspeed_dsa import session

    running = session.current()
    return [name for name in running.contexts if name.startswith("recompute-outputs")] if running else []


def after_undo(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Check that a model outlives the feature and then uses Megatron's functions."""
    import megatron.core.transformer.mlp as mlp
    import megatron.core.transformer.transformer_layer as transformer_layer
    from megatron.core import tensor_parallel

    import mindspeed_dsa

    before = (
        mlp.MLP.forward,
        transformer_layer.TransformerLayer.forward,
        tensor_parallel.CheckpointWithoutOutput,
    )
    job.start(switches)
    _, (model,) = built(PLAIN)
    during = (
        mlp.MLP.forward,
        transformer_layer.TransformerLayer.forward,
        tensor_parallel.CheckpointWithoutOutput,
    )
    job.per_token_loss(model, job.samples(2)).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    # Attributes that the feature may have left on modules.
    attributes = [sorted(set(vars(module)) - _BUILT_IN) for module in model.modules()]
    mindspeed_dsa.disable()
    after = (
        mlp.MLP.forward,
        transformer_layer.TransformerLayer.forward,
        tensor_parallel.CheckpointWithoutOutput,
    )
    model.zero_grad()
    # The same model again, now without the feature.
    with mindspeed_dsa.enabled(**job.DSA_ON), watched() as counts:
        job.per_token_loss(model, job.samples(2)).sum().backward()
    return {
        "restored": before == after,
        "changed": [a is not b for a, b in zip(before, during, strict=True)],
        "discarded": counts["discarded"],
        "same": all(torch.equal(gradients[name], p.grad) for name, p in model.named_parameters()),
        "attributes": [name for names in attributes for name in names if "mindspeed" in name],
        "flags": [layer.recompute_input_layernorm for layer in model.decoder.layers],
    }


_BUILT_IN = set(vars(torch.nn.Module()))


def misuse(switches: Mapping[str, Any], how: str) -> None:
    """Use a recomputed output in an unsupported way."""
    job.start(switches)
    _, (model,) = built(PLAIN)
    tokens = job.samples(2)[:, :-1]
    # Of logits, because Megatron's cross entropy does not support a second backward.
    loss = model(tokens, torch.arange(job.SEQUENCE).expand(2, -1), None).sum()
    if how == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        torch.autograd.grad(loss, list(model.parameters()))


def grouped_experts(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Run grouped experts with matrix products in place of their GPU kernels."""
    from megatron.core.transformer.moe import experts, grouped_gemm_util

    import mindspeed_dsa

    job.start(switches)

    def gmm(tokens: Tensor, weights: Tensor, counts: Tensor, trans_b: bool) -> Tensor:
        parts = zip(tokens.split(counts.tolist()), weights, strict=True)  # [tokens, in], [in, out]
        return torch.cat([part @ weight for part, weight in parts])

    with (
        mock.patch.object(grouped_gemm_util, "assert_grouped_gemm_is_available"),
        mock.patch.object(grouped_gemm_util, "ops", mock.Mock(gmm=gmm)),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    ):
        cfg = job.config(
            **{**EXPERTS, "bf16": True, "params_dtype": torch.bfloat16, "moe_grouped_gemm": True}
        )
        module = experts.GroupedMLP(4, cfg, experts.ProcessGroupCollection.use_mpu_process_groups())
        torch.nn.init.normal_(module.weight1, generator=torch.Generator().manual_seed(1))
        torch.nn.init.normal_(module.weight2, generator=torch.Generator().manual_seed(2))
        if switches:
            from mindspeed_dsa.features.memory.recompute_outputs import activations

            activations._chosen[module] = "layer 1, mlp.experts"
        results = {}
        for counts in ([3, 0, 2, 4], [0, 0, 0, 0]):
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randn(sum(counts), 32, generator=generator).bfloat16().requires_grad_()
            probs = torch.rand(sum(counts), generator=generator).requires_grad_()
            with watched() as seen:
                output, _ = module(tokens, torch.tensor(counts), probs)
                output.sum().backward()
            results[str(counts)] = [output.detach(), tokens.grad, probs.grad, module.weight1.grad.clone()]
            results[f"discarded {counts}"] = seen["discarded"]
        results["own flag"] = module.activation_recompute
    mindspeed_dsa.disable()
    return results


def chosen_layers(switches: Mapping[str, Any], num_layers: int, **layout: Any) -> dict[str, list[int]]:
    """Return the layers of this rank whose outputs are recomputed, by feature."""
    from mindspeed_dsa.features.memory.recompute_outputs import activations
    from mindspeed_dsa.features.memory.recompute_outputs import norms as recompute_norm

    job.start(switches, **layout)
    vpp = layout.get("vpp")
    _, chunks = built({"num_layers": num_layers}, stages=vpp or 1, pp=layout.get("pp", 1))
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    return {
        "activation": [
            layer.layer_number
            for layer in layers
            if any(module in activations._chosen for module in layer.mlp.modules())
        ],
        "norm": [layer.layer_number for layer in layers if layer in recompute_norm._layers],
    }


def changed_norm_weight(switches: Mapping[str, Any], overrides: Mapping[str, Any] = PLAIN) -> None:
    """Change a norm's weight between forward and recomputation."""
    job.start(switches)
    _, (model,) = built(overrides)
    loss = job.per_token_loss(model, job.samples(2)).sum()
    with torch.no_grad():
        model.decoder.layers[0].input_layernorm.weight[3] *= 1.001
    loss.backward()
