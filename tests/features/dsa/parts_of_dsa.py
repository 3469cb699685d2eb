"""Worker functions for tests of parts of DSA that are no full training steps."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.support import model as job

TARGETS = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.experimental_attention_variant.dsa",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.torch_norm",
)


def arm_and_undo(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of all patch sites, and the objects that differ while DSA is on and after."""
    import mindspeed_dsa

    before = _identities()
    job.start(switches)
    job.gpt_model(job.config())
    sites, during = mindspeed_dsa.report(), _identities()
    mindspeed_dsa.disable()
    after = _identities()
    return {
        "sites": sites,
        "changed by enable": [name for name in during if during[name] is not before.get(name)],
        "still changed after disable": [
            name for name in before.keys() | after if after.get(name) is not before.get(name)
        ],
    }


def _identities() -> dict[str, Any]:
    """Return every object in the target modules and in their classes."""
    objects: dict[str, Any] = {}
    for module in map(importlib.import_module, TARGETS):
        for name, value in vars(module).items():
            objects[f"{module.__name__}:{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                objects |= {f"{module.__name__}:{name}.{part}": inner for part, inner in vars(value).items()}
    return {name: value for name, value in objects.items() if not name.rpartition(":")[2].startswith("__")}


def active_features(switches: Mapping[str, Any]) -> list[str]:
    from mindspeed_dsa import session

    _, active = session.resolve(switches, ())
    return [feature.name for feature in active]


def core_attentions(switches: Mapping[str, Any]) -> list[str]:
    """Return the core attention class of every layer in Megatron's block spec."""
    job.start(switches)
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    block = specs.get_transformer_block_with_experimental_attention_variant_spec(job.config())
    attentions = [layer.submodules.self_attention.submodules for layer in block.layer_specs]
    return [attention.core_attention.module.__name__ for attention in attentions]


def other_variant_still_refused() -> str:
    job.start()
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    cfg = job.config()
    cfg.experimental_attention_variant = "unheard_of"
    try:
        specs.get_experimental_attention_variant_module_spec(cfg)
    except ValueError as error:
        return str(error)
    return ""


def mtp_step() -> dict[str, Any]:
    """Take one step of a model with two MTP layers, built by Megatron's spec functions."""
    job.start()
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    cfg = job.config(mtp_num_layers=2)
    model = job.gpt_model(cfg, mtp=True)
    job.train_step(cfg, [model], [job.samples(2)])
    reported = DSAIndexerLossLoggingHelper.tracker["reported"].tolist()
    metrics: dict[str, Tensor] = {}
    values = DSAIndexerLossLoggingHelper.tracker["values"].clone()
    DSAIndexerLossLoggingHelper.track_indexer_metrics(1.0, 1, None, total_loss_dict=metrics)
    return {
        "gradients": job.gradients([model], only="indexer"),
        "reported": reported,
        "values": values,
        "metrics": metrics,
    }


def parameter_names() -> list[str]:
    job.start()
    return [name for name, _ in job.gpt_model(job.config()).named_parameters()]


def learn(steps: int, dtype: str, switches: Mapping[str, Any] | None = None) -> list[float]:
    """Train on one batch with plain AdamW; return the losses."""
    job.start(switches)
    cfg = job.config(params_dtype=getattr(torch, dtype))
    model = job.gpt_model(cfg).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = job.samples(4)
    losses = []
    for _ in range(steps):
        loss = job.per_token_loss(model, tokens).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def norms(normalization: str, zero_centered: bool) -> dict[str, Any]:
    """Return output, parameters and marks of Megatron's norm under sequence parallelism."""
    job.start()
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    cfg = job.config(tensor_model_parallel_size=2, sequence_parallel=True, normalization=normalization)
    cfg.layernorm_zero_centered_gamma = zero_centered
    norm = WrappedTorchNorm(cfg, 32, eps=1e-5)
    initial = {name: parameter.detach().clone() for name, parameter in norm.named_parameters()}
    with torch.no_grad():
        for index, parameter in enumerate(norm.parameters()):
            # Weights other than the initial ones and zeros.
            parameter.add_(torch.linspace(-1, 1, 32) * (index + 1))
    hidden = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(3))
    return {
        "input": hidden,
        "output": norm(hidden).detach(),
        "initial": initial,
        "parameters": {name: parameter.detach() for name, parameter in norm.named_parameters()},
        "marks": [getattr(parameter, "sequence_parallel", False) for parameter in norm.parameters()],
    }


def duplicated_linears(cpu_initialization: bool) -> dict[str, Any]:
    """Return one rank's initial weights of the duplicated linears and of the split projections."""
    job.start(tp=2)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    cfg = job.config(
        tensor_model_parallel_size=2, sequence_parallel=True, use_cpu_initialization=cpu_initialization
    )
    spec = specs.get_transformer_block_with_experimental_attention_variant_spec(cfg)
    model = GPTModel(cfg, spec, job.VOCABULARY, job.SEQUENCE, position_embedding_type="rope")
    return {
        "weights": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "sequence parallel": {
            name: getattr(parameter, "sequence_parallel", False)
            for name, parameter in model.named_parameters()
        },
        "std": cfg.init_method_std,
    }


def checkpoint_shards(tp: int) -> list[dict[str, Any]]:
    """Return the shards that this rank would write into a distributed checkpoint."""
    job.start(tp=tp)
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    model = job.gpt_model(job.config(tensor_model_parallel_size=tp, sequence_parallel=tp > 1))
    entries = model.sharded_state_dict()
    apply_factories(entries)
    return [
        {
            "key": entry.key,
            "shape": entry.global_shape,
            "offset": entry.global_offset,
            "data": entry.data.detach().clone(),
        }
        for entry in _leaves(entries)
        # Replicas are written only once.
        if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id)
    ]


def _leaves(entries: Any) -> list[Any]:
    if isinstance(entries, dict):
        entries = list(entries.values())
    return [leaf for entry in entries for leaf in _leaves(entry)] if isinstance(entries, list) else [entries]


def grouped_gemm_without_its_package() -> dict[str, Any]:
    job.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = job.gpt_model(job.config(moe_grouped_gemm=True))
    return {
        "experts": type(model.decoder.layers[1].mlp.experts).__name__,
        "warnings": [str(warning.message) for warning in caught],
    }


def rotate(activation: Tensor, switches: Mapping[str, Any] | None = None) -> Tensor:
    """Call ``rotate_activation`` by the name that Megatron's indexer uses."""
    job.start(switches)
    from megatron.core.transformer.experimental_attention_variant import dsa

    return dsa.rotate_activation(activation)


def rotate_for_evaluation_first() -> Tensor:
    """Return a gradient after the Hadamard matrix was first cached in ``inference_mode``."""
    job.start()
    from megatron.core.transformer.experimental_attention_variant import dsa

    size = 256  # no other test uses this size, so nothing is cached
    with torch.inference_mode():
        dsa.rotate_activation(torch.ones(2, size))
    activation = torch.ones(2, size, requires_grad=True)
    dsa.rotate_activation(activation).sum().backward()
    return activation.grad


def rotation_gradcheck() -> bool:
    job.start()
    from megatron.core.transformer.experimental_attention_variant import dsa

    # Size 8 with float64, exact enough for finite differences.
    activation = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(dsa.rotate_activation, activation)
