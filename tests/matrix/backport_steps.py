"""Cases that run inside the worker pool for test_backport."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import multiprocessing
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.features.dsa import cp_cases
from tests.matrix import model as tiny
from tests.support import model as job
from tests.support.counting import counted

TARGETS = (
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.transformer.torch_norm",
)


def learn(
    steps: int, switches: Mapping[str, Any] | None = None, bf16: bool = False
) -> dict[str, list[float]]:
    """Train on one batch with Megatron's optimizer, experts included."""
    job.start(switches)
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    dtype = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16} if bf16 else {}
    cfg = tiny.config(**tiny.EXPERTS, **dtype)
    model = Float16Module(cfg, tiny.gpt_model(cfg)) if bf16 else tiny.gpt_model(cfg)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(cfg, ddp, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, weight_decay=0.0, bf16=bf16), [chunk])
    cfg.finalize_model_grads_func = finalize_model_grads
    cfg.grad_scale_func = optimizer.scale_loss
    losses, indexer = [], []
    for _ in range(steps):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=lambda iterator, model: job.forward_step(cfg, iterator, model),
            data_iterator=iter([job.samples(4)]),
            model=chunk,
            num_microbatches=1,
            seq_length=job.SEQUENCE,
            micro_batch_size=4,
            forward_only=False,
        )
        optimizer.step()
        losses.append(float(reports[0]["lm loss"]))
        indexer.append(tiny.logged_indexer_loss(1))
    return {"losses": losses, "indexer": indexer}


def mtp_step() -> dict[str, Any]:
    """Return which layers report an indexer loss with one MTP layer, and which indexers it trains."""
    job.start()
    from mindspeed_dsa.feature import Megatron
    from mindspeed_dsa.features.dsa.indexer_loss import indexer_loss

    model = tiny.gpt_model(tiny.config(mtp_num_layers=1, mtp_loss_scaling_factor=0.1))
    job.per_token_loss(model, job.samples(2)).mean().backward()
    return {
        "reported": indexer_loss(Megatron()).tracker.tracker["reported"].tolist(),
        "trained": [bool(p.grad.any()) for name, p in model.named_parameters() if "indexer" in name],
    }


def overlapped(coefficient: float | None) -> dict[str, Tensor]:
    """Return gradients of one of two data parallel ranks that overlap reduction with backward."""
    job.start()
    import torch.distributed as dist

    cfg = tiny.config(dsa_indexer_loss_coeff=coefficient)
    model = tiny.gpt_model(cfg)
    mine = job.samples(8).view(2, 4, -1)[dist.get_rank()]
    job.train_step(cfg, [model], [mine], {"overlap_grad_reduce": True, "bucket_size": 2000})
    return {tiny.common_name(name): gradient for name, gradient in job.gradients([model]).items()}


def calls(recompute: str) -> dict[str, int]:
    """Count selections and indexer loss computations in a step of two layers."""
    job.start()
    from mindspeed_dsa.features.dsa import sparse_attention

    overrides: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if recompute == "full":
        overrides = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    model = tiny.gpt_model(tiny.config(**overrides))
    with counted(sparse_attention, "lightning_indexer", "sparse_loss") as counts:
        job.per_token_loss(model, job.samples(2)).mean().backward()
    return counts


def loss_calls(switches: Mapping[str, Any]) -> dict[str, int]:
    """Count indexer loss computations of a two-layer step, in forward and in attention's backward."""
    job.start(switches)
    from mindspeed_dsa.features.dsa import sparse_attention

    model = tiny.gpt_model(tiny.config())
    in_backward = "divergence_and_score_gradient"
    with counted(sparse_attention, "sparse_loss") as ordinary, counted(sparse_attention, in_backward) as late:
        total = job.per_token_loss(model, job.samples(2)).mean()
        before = late[in_backward]
        total.backward()
    return {**ordinary, f"{in_backward} in forward": before, "and in all": late[in_backward]}


def per_token_gradients(switches: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of a step that sums over tokens and divides at the end."""
    job.start(switches)
    cfg = tiny.config(calculate_per_token_loss=True)
    model = tiny.gpt_model(cfg)
    job.train_step(cfg, [model], list(job.samples(8).view(2, 4, -1)))
    return {tiny.common_name(name): gradient for name, gradient in job.gradients([model]).items()}


def finalized_indexer_gradients() -> list[float]:
    """Finalize indexer gradients of 1 and 2 on two tensor parallel ranks, and return the result."""
    job.start(tp=2)
    import torch.distributed as dist
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    cfg = tiny.config(tensor_model_parallel_size=2, sequence_parallel=True)
    chunk = DistributedDataParallel(cfg, DistributedDataParallelConfig(), tiny.gpt_model(cfg))
    indexer = [p for name, p in chunk.named_parameters() if "indexer" in name]
    for parameter in indexer:
        parameter.main_grad.fill_(1.0 + dist.get_rank())
    finalize_model_grads([chunk])
    return [float(value) for p in indexer for value in (p.main_grad.min(), p.main_grad.max())]


def gradients_of_each_loss() -> dict[str, tuple[float, float]]:
    """Return each parameter's largest gradient of the model loss and of the indexer loss."""
    job.start()
    maxima: list[dict[str, float]] = []
    for weight, coefficient in ((1.0, None), (0.0, 1.0)):
        model = tiny.gpt_model(tiny.config(dsa_indexer_loss_coeff=coefficient))
        (job.per_token_loss(model, job.samples(2)).mean() * weight).backward()
        maxima.append({name: float(p.grad.abs().max()) for name, p in model.named_parameters()})
    return {name: (maxima[0][name], maxima[1][name]) for name in maxima[0]}


def without_loss(mode: str) -> dict[str, Any]:
    """Return the work done for the indexer loss in a mode without that loss."""
    job.start()
    from mindspeed_dsa.feature import Megatron
    from mindspeed_dsa.features.dsa import core_attention, sparse_attention
    from mindspeed_dsa.features.dsa.indexer_loss import indexer_loss

    coefficient = {"coefficient 0": 0.0, "no coefficient": None}.get(mode, 1.0)
    model = tiny.gpt_model(tiny.config(dsa_indexer_loss_coeff=coefficient))
    model.train(mode != "evaluation")
    graphs = 0
    start_index = core_attention.start_index

    def watched(call: Any) -> Any:
        nonlocal graphs
        under_way = start_index(call)
        graphs += under_way.wait().query.requires_grad
        return under_way

    core_attention.start_index = watched
    try:
        names = ("sparse_loss", "dense_loss")
        with counted(sparse_attention, *names) as counts, torch.set_grad_enabled(mode != "no_grad"):
            loss = job.per_token_loss(model, job.samples(2)).mean()
            if mode != "no_grad":
                loss.backward()
    finally:
        core_attention.start_index = start_index
    grads = [p.grad for name, p in model.named_parameters() if "indexer" in name]
    return {
        "losses computed": sum(counts.values()),
        "graphs of scores": graphs,
        "tracked": indexer_loss(Megatron()).tracker.tracker.get("values"),
        "indexer gradients": [grad is not None and not grad.any() for grad in grads],
    }


def _saved_model(tp: int) -> Any:
    job.start(tp=tp)
    return tiny.gpt_model(tiny.config(tensor_model_parallel_size=tp, sequence_parallel=tp > 1))


def save(folder: str, tp: int) -> None:
    model = _saved_model(tp)
    from megatron.core import dist_checkpointing

    # Megatron writes in a process of its own, which the pool's workers may not start as daemons.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    _let_old_writers_write()
    dist_checkpointing.save(model.sharded_state_dict(prefix=""), folder)


def _let_old_writers_write() -> None:
    """Pass the writer of torch >= 2.8 the argument that Megatron-core 0.12 omits."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch.distributed.checkpoint import filesystem

    if "serialization_format" not in inspect.getsource(filesystem_async):
        filesystem_async._write_item = partial(
            filesystem._write_item, serialization_format=filesystem.SerializationFormat.TORCH_SAVE
        )


def load(folder: str) -> dict[str, Any]:
    model = _saved_model(1)
    from megatron.core import dist_checkpointing

    expected = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)
    }
    with torch.no_grad():
        expected_loss = job.per_token_loss(model, job.samples(2)).mean().item()
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    state = dist_checkpointing.load(model.sharded_state_dict(prefix=""), folder)
    model.load_state_dict(state)
    loaded = model.state_dict()
    with torch.no_grad():
        loss = job.per_token_loss(model, job.samples(2)).mean().item()
    return {
        "keys": len(expected),
        "different": [name for name, tensor in expected.items() if not torch.equal(loaded[name], tensor)],
        "loss": loss,
        "expected loss": expected_loss,
    }


def without_variant() -> str:
    """Return Megatron's error for MLA on local modules without an attention variant."""
    job.start()
    try:
        tiny.gpt_model(tiny.config(experimental_attention_variant=None))
    except TypeError as error:
        return str(error)
    return ""


def indexer_input(switches: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether the indexer reads the latent query before or after its norm."""
    job.start(switches)
    model = tiny.gpt_model(tiny.config())
    attention = model.decoder.layers[0].self_attention
    seen: dict[str, Tensor] = {}
    attention.core_attention.indexer.linear_wq_b.register_forward_pre_hook(
        lambda module, inputs: seen.setdefault("indexer", inputs[0])
    )
    attention.q_layernorm.register_forward_hook(
        lambda module, inputs, output: seen.update(before=inputs[0].detach(), after=output.detach())
    )
    job.per_token_loss(model, job.samples(2))
    return {
        "normalised": torch.equal(seen["indexer"], seen["after"]),
        "plain": torch.equal(seen["indexer"], seen["before"]),
    }


def still_changed_after_disable() -> list[str]:
    """Return the Megatron objects that differ after a model was built and everything was undone."""
    import mindspeed_dsa

    before = _identities()
    tiny.one_step()
    mindspeed_dsa.disable()
    after = _identities()
    return [name for name in before.keys() | after if after.get(name) is not before.get(name)]


def _identities() -> dict[str, Any]:
    from importlib import import_module

    objects: dict[str, Any] = {}
    for module in map(import_module, TARGETS):
        for name, value in vars(module).items():
            objects[f"{module.__name__}:{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                objects |= {f"{module.__name__}:{name}.{part}": inner for part, inner in vars(value).items()}
                for field, inner in getattr(value, "__dataclass_fields__", {}).items():
                    objects[f"{module.__name__}:{name}.{field}"] = inner
    return {name: value for name, value in objects.items() if "._" not in name.rpartition(":")[2]}


def fields() -> dict[str, Any]:
    """Build, copy and derive configurations with the new fields."""
    job.start()
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    cfg = tiny.config(dsa_indexer_loss_coeff=0.5)
    copied = dataclasses.replace(cfg, num_layers=3)

    @dataclasses.dataclass
    class Derived(MLATransformerConfig):
        mine: int = 9

    base = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg) if field.init}
    derived = Derived(**base)
    plain = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    return {
        "known": [
            {"dsa_indexer_topk", "experimental_attention_variant"} <= {f.name for f in dataclasses.fields(c)}
            for c in (TransformerConfig, MLATransformerConfig)
        ],
        "copied": (
            copied.experimental_attention_variant,
            copied.dsa_indexer_topk,
            copied.dsa_indexer_loss_coeff,
            copied.dsa_indexer_use_sparse_loss,
        ),
        "derived": (derived.experimental_attention_variant, derived.mine),
        "plain": (
            plain.experimental_attention_variant,
            plain.dsa_indexer_topk,
            plain.dsa_indexer_use_sparse_loss,
        ),
    }


def flags() -> dict[str, Any]:
    """Run the decorated parse_args of a parser that already has one of the flags."""
    job.start()
    from mindspeed_dsa.features.dsa.backport.feature import with_dsa_flags

    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--dsa-indexer-topk", type=int)
        parser = extra_args_provider(parser)
        line = "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16"
        line += " --dsa-indexer-topk 7 --dsa-indexer-loss-coeff 0.5 --dsa-indexer-use-sparse-loss --mine kept"
        return parser.parse_args(line.split())

    def provider(parser: Any) -> Any:
        parser.add_argument("--mine")
        return parser

    once = with_dsa_flags(parse_args)
    return {
        "values": vars(once(provider)),
        "twice": vars(with_dsa_flags(once)(provider)) == vars(once(provider)),
    }


def context_parallel_step(cp: int) -> dict[str, Any]:
    """Run :func:`tiny.one_step` on context parallel ranks."""
    switches = {"use_fused_dsa": True, "context_parallel_size": cp}
    with cp_cases.context_parallel(tiny, cp):
        return tiny.one_step(switches, num_microbatches=2, micro_batch_size=2, cp=cp)


def context_parallel_step_in_parts(cp: int) -> dict[str, Any]:
    """Run :func:`context_parallel_step` with the keys gathered in two parts."""
    with cp_cases.parts_kept_apart() as gathered:
        result = context_parallel_step(cp)
    assert set(gathered) == {2}
    return result


def context_parallel_indexer(cp: int, rope_type: str) -> dict[str, Tensor]:
    """Return the indexer's projections of a rank's tokens, and the tokens' positions."""
    job.start(cp=cp)
    return cp_cases.index_rows(cp_cases.backport_spec().submodules.indexer, tiny.config(rope_type=rope_type))
