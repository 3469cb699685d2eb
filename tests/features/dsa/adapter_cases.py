"""Worker functions: DSA layers with LoRA. The adapters have the structure of outside packages' ones.

``tests/hosts/frameworks`` runs the packages themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mindspeed_dsa.megatron.adapters import matrices_of
from mindspeed_dsa.megatron.local_modules import duplicated_linear, norm_of_fused_layer
from tests.features.dsa.fused_cases import ties_to_the_lowest
from tests.support import model as job

UP = ("linear_kv_up_proj", "linear_q_up_proj")
DOWN = ("linear_q_down_proj", "linear_kv_down_proj")
INDEXER = tuple(f"core_attention.indexer.linear_{name}" for name in ("wq_b", "wk", "weights_proj"))
RANK = 4


def _column(inputs: int, outputs: int, config: Any, **options: Any) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    init = torch.nn.init.zeros_
    return ColumnParallelLinear(inputs, outputs, config=config, init_method=init, bias=False, **options)


def _copied(inputs: int, outputs: int, config: Any) -> Any:
    from mindspeed_dsa.feature import Megatron

    return duplicated_linear(Megatron())(
        inputs, outputs, config=config, init_method=torch.nn.init.zeros_, bias=False
    )


def _sizes(base: Any) -> tuple[int, int, bool]:
    """Return a layer's numbers of inputs and outputs over all ranks, and whether ranks split the outputs."""
    is_split = hasattr(base, "output_size")
    outputs, inputs = base.weight.shape
    return inputs, base.output_size if is_split else outputs, is_split


def _input_of(base: Any, states: Tensor) -> Tensor:
    return norm_of_fused_layer(base, states, base.config) if hasattr(base, "layer_norm_weight") else states


class PeftLayer(torch.nn.Module):
    """Layer with the structure of PEFT's ``LoraLayer`` and mcore-bridge's ``LoraParallelLinear``.

    A is on every tensor parallel rank, B is split like the wrapped layer.
    """

    def __init__(self, base_layer: Any, names: Sequence[str] = ("default",), dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer, config = base_layer, base_layer.config
        inputs, outputs, is_split = _sizes(base_layer)
        self.lora_A, self.lora_B, self.lora_dropout = (torch.nn.ModuleDict() for _ in range(3))
        self.lora_magnitude_vector = torch.nn.ModuleDict()
        self.lora_variant: dict[str, Any] = {}
        self.scaling: dict[str, float] = {}
        self.active_adapters, self.disable_adapters, self.merged = list(names), False, False
        for number, name in enumerate(names, 2):
            self.lora_A[name] = _copied(inputs, RANK, config)
            self.lora_B[name] = (_column if is_split else _copied)(RANK, outputs, config)
            self.lora_dropout[name] = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()
            self.scaling[name] = number / 2

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        result, bias = self.base_layer(states, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result, bias
        states = _input_of(self.base_layer, states)
        for name in filter(self.lora_A.__contains__, self.active_adapters):
            low, _ = self.lora_A[name](self.lora_dropout[name](states))
            result = result + self.lora_B[name](low)[0] * self.scaling[name]
        return result, bias


class BridgeAdapter(torch.nn.Module):
    """Module with the structure of Megatron-Bridge's ``ParallelLinearAdapter``: ranks split both matrices."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        inputs, outputs, is_split = _sizes(base)
        config = copy.copy(base.config)
        config.sequence_parallel = False
        self.dim, self.alpha = RANK, 6
        is_shard = base.config.sequence_parallel
        self.linear_in = _column(inputs, RANK, config, gather_output=True, disable_grad_reduce=is_shard)
        self.linear_out = _column(RANK, outputs, config, gather_output=not is_split)
        self.activation = self.dropout = torch.nn.Identity()
        self.gathers = is_shard and is_split

    def forward(self, states: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        states = gather_from_sequence_parallel_region(states) if self.gathers else states
        return self.linear_out(self.linear_in(states)[0])[0] * (self.alpha / self.dim)


class BridgeLayer(torch.nn.Module):
    """Layer with the structure of Megatron-Bridge's ``LoRALinear``."""

    def __init__(self, to_wrap: Any) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, BridgeAdapter(to_wrap)
        self._adapter_enabled = True

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        result, bias = self.to_wrap(states, *args, **kwargs)
        if not self._adapter_enabled:
            return result, bias
        return result + self.adapter(_input_of(self.to_wrap, states).contiguous()), bias


KINDS = {"peft": PeftLayer, "bridge": BridgeLayer}


def adapt(model: Any, kind: str, targets: Sequence[str], **options: Any) -> None:
    """Freeze a model, and wrap these layers of every attention."""
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for target in targets:
            parent, _, name = target.rpartition(".")
            module = layer.self_attention.get_submodule(parent)
            setattr(module, name, KINDS[kind](getattr(module, name), **options))
    job.fill_by_name(model)


def step(
    kind: str,
    targets: Sequence[str],
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    sequence_parallel: bool = True,
    **layout: Any,
) -> dict[str, Any]:
    """Run one training step of a model with adapters; return loss and gradients."""
    job.start(switches, **layout)
    tp = layout.get("tp", 1)
    cfg = job.config(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1 and sequence_parallel,
        context_parallel_size=layout.get("cp", 1),
        **(overrides or {}),
    )
    model = job.gpt_model(cfg)
    adapt(model, kind, targets)
    with ties_to_the_lowest():
        losses = job.train_step(cfg, [model], [job.samples(2)])
    return {
        "losses": [entry["lm loss"] for entry in losses],
        "gradients": job.gradients([model]),
        "split": job.split_dimensions([model]),
    }


def frozen_indexer(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with a gradient, and whether the indexer loss had a graph, by layer."""
    job.start(switches)
    from mindspeed_dsa.features.dsa import loss

    model = job.gpt_model(job.config())
    adapt(model, "peft", UP)
    graphs: list[bool] = []
    compute = loss.indexer_kl_loss

    def watch(*inputs: Any, **options: Any) -> Tensor:
        value = compute(*inputs, **options)
        graphs.append(value.requires_grad)
        return value

    with mock.patch.object(loss, "indexer_kl_loss", watch):
        job.per_token_loss(model, job.samples(2)).mean().backward()
    return {"trained": [n for n, p in model.named_parameters() if p.grad is not None], "graphs": graphs}


def latent_queries_of_indexer() -> list[Tensor]:
    """Return the indexer's latent query without and with an adapter of zeros on the query's up-projection."""
    job.start({"use_fused_dsa": True})
    model = job.gpt_model(job.config(dsa_indexer_normalised_query=True))
    attention, seen = model.decoder.layers[0].self_attention, []
    attention.core_attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["qr"].detach()), with_kwargs=True
    )
    job.per_token_loss(model, job.samples(1))
    attention.linear_q_up_proj = PeftLayer(attention.linear_q_up_proj)
    job.per_token_loss(model, job.samples(1))
    return seen


def _attention() -> tuple[Any, Any]:
    from mindspeed_dsa.feature import Megatron
    from mindspeed_dsa.megatron.mla_projections import Projections

    job.start({"use_fused_dsa": True})
    # Without a norm in front of it, the layer is only its weight.
    model = job.gpt_model(job.config(num_layers=1, moe_layer_freq=[0], qk_layernorm=False))
    attention = model.decoder.layers[0].self_attention
    return attention, Projections(attention, Megatron())


@torch.no_grad()
def drawn(layer: Any) -> Any:
    """Return an adapted layer after drawing all of its matrices."""
    for matrix in (matrix for pair in matrices_of(layer) for matrix in pair):
        matrix.weight.normal_()
    return layer


def read_by_absorbed_attention() -> list[bool]:
    """Return whether Megatron 0.19's absorbed attention reads the weight itself, and then the folded one."""
    from mindspeed_dsa.features.dsa.repairs.backward import fold_adapters

    attention, projections = _attention()
    weights = fold_adapters(lambda layer: layer.linear_kv_up_proj.weight, projections)
    plain = weights(attention) is attention.linear_kv_up_proj.weight
    attention.linear_kv_up_proj = drawn(PeftLayer(attention.linear_kv_up_proj))
    folded = projections.up_projections("test", "nothing")
    return [plain, *map(torch.equal, weights(attention), folded)]


def states() -> dict[str, tuple[float, float]]:
    """Return largest differences of the folded weight, by an adapter's state.

    The first one is to the weight that the layer's own forward applies, the second one to the wrapped
    layer's.
    """
    attention, projections = _attention()
    base, differences = attention.linear_kv_up_proj, {}
    basis = torch.eye(base.weight.size(1)).unsqueeze(1)  # [inputs, 1, inputs]

    def compare(state: str, layer: Any) -> None:
        attention.linear_kv_up_proj = layer
        expected = layer(basis)[0].squeeze(1).t()
        folded = projections.up_projection("test", "nothing")
        key, value = projections.up_projections("test", "nothing")
        torch.testing.assert_close(torch.cat([key, value], dim=1).flatten(0, 1), folded)
        pairs = (expected, base.weight)
        differences[state] = tuple((folded - other).abs().max().item() for other in pairs)

    with torch.no_grad():
        layer = drawn(BridgeLayer(base))
        compare("bridge", layer)
        layer._adapter_enabled = False
        compare("bridge disabled", layer)
        layer = drawn(PeftLayer(base, names=("a", "b", "idle")))
        for active in (["a"], ["b"], ["a", "b", "elsewhere"]):
            layer.active_adapters = active
            compare(f"peft {' '.join(active)}", layer)
        layer.disable_adapters = True
        compare("peft disabled", layer)
        layer.disable_adapters, layer.merged = False, True
        compare("peft merged", layer)
    return differences


def refused(fault: str) -> None:
    """Fold an adapter that does more than add a product."""
    attention, projections = _attention()
    layer = PeftLayer(attention.linear_kv_up_proj, dropout=0.05 if "dropout" in fault else 0.0)
    attention.linear_kv_up_proj = layer
    if fault == "DoRA":
        layer.lora_magnitude_vector["default"] = torch.nn.Linear(1, 1)
    elif fault == "variant":
        layer.lora_variant["default"] = torch.nn.Tanh()
    elif fault == "bias":
        layer.lora_B["default"].bias = torch.nn.Parameter(torch.ones(2))
    elif fault == "no matrices":
        layer.lora_A, layer.lora_B = torch.nn.ModuleDict(), torch.nn.ModuleDict()
    elif fault == "activation":
        attention.linear_kv_up_proj = BridgeLayer(layer.base_layer)
        attention.linear_kv_up_proj.adapter.activation = torch.nn.SiLU()
    elif fault == "bridge DoRA":
        attention.linear_kv_up_proj = BridgeLayer(layer.base_layer)
        attention.linear_kv_up_proj.adapter.weight_magnitude = torch.nn.Parameter(torch.ones(2))
    elif fault == "dropout in evaluation":
        layer.eval()
    projections.up_projections("dsa-absorb", "add --no-use-dsa-absorb")
