"""One rank of a model with wrapped layers, compared with the same model in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from mindspeed_dsa.integrations.transformers import apply_dsa
from tests.hosts.transformers.models import build, close, tokens

COEFFICIENT = 0.5

# -- trained parameters ------------------------------------------------------------------------

TRAINED: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "indexers": lambda name: ".indexer." in name,
    "one indexer": lambda name: ".layers.0.self_attn.indexer." in name,
    "indexers and a layer between": lambda name: ".indexer." in name or ".layers.1." in name,
}


def built(kind: str, trained: str) -> Any:
    model = build(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED[trained](name))
    return model


def adapted(kind: str) -> Any:
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["wq_b", "wk", "weights_proj"])
    return peft.get_peft_model(build(kind), config)


# -- wrapped modules ---------------------------------------------------------------------------


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]


def shard(model: Any, *parts: str, **options: Any) -> Any:
    """Apply FSDP2 to parts of each layer, by their names, and to the model; "" is the layer."""
    options["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in parts:
        for layer in layers_of(model):
            module = attrgetter(part)(layer) if part else layer
            if module is not None:  # layers that share a selection have no indexer
                fully_shard(module, **options)
    return fully_shard(model, **options)


def shard_recomputed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return shard(model, "")


def wrap_in_first_fsdp(model: Any) -> Any:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(layers_of(model)[0])}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "layers": lambda model: shard(model, ""),
    "layers, recomputed": shard_recomputed,
    "the model": lambda model: shard(model, reshard_after_forward=True),
    "attention": lambda model: shard(model, "self_attn"),
    "indexers and layers": lambda model: shard(model, "self_attn.indexer", ""),
    "layers, FSDP1": wrap_in_first_fsdp,
}


# -- comparisons -------------------------------------------------------------------------------


def step(model: Any, in_use: Any, ids: torch.Tensor, own_loss: bool = False) -> None:
    """Run backward of the model's loss and the indexers', or only of the indexers'."""
    output = model(input_ids=ids, labels=None if own_loss else ids, use_cache=False)
    (COEFFICIENT * in_use.loss if own_loss else output.loss).backward()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return whole gradients by the parameters' names in one process."""
    if isinstance(model, FullyShardedDataParallel):
        context: Any = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    else:
        context = nullcontext()
    with context:
        return {
            name.replace("_fsdp_wrapped_module.", ""): (
                x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad.clone()
            )
            for name, x in model.named_parameters()
            if x.grad is not None
        }


def compare(
    make: Callable[[], Any],
    wrap: Callable[[Any], Any],
    before: bool = False,
    own_loss: bool = False,
    stage: str = "warmup",
    bound: float = 1e-4,
    loss_layers: str = "own",
) -> list[str]:
    """Return names of losses and gradients of two steps that differ from one process with the whole batch.

    Args:
        make: function that builds the model.
        wrap: function that shards the model.
        before: whether the model is in use before it is wrapped.
        own_loss: whether only the indexers' loss runs backward.
        stage: stage of the training.
        bound: bound of a difference, relative to the largest value.
        loss_layers: layers whose attention an indexer learns from.
    """
    options: dict[str, Any] = {
        "stage": stage,
        "loss_coeff": COEFFICIENT,
        "indexer_loss_layers": loss_layers,
    }
    ids = tokens(2 * dist.get_world_size())
    alone = make()
    whole = apply_dsa(alone, **options)
    step(alone, whole, ids, own_loss)
    expected = gradients(alone)
    assert expected

    model = make()
    in_use = apply_dsa(model, **options) if before else None
    model = wrap(model)
    in_use = in_use or apply_dsa(model, **options)
    local_ids = ids.chunk(dist.get_world_size())[dist.get_rank()]
    wrong = []
    for _ in range(2):
        model.zero_grad()
        step(model, in_use, local_ids, own_loss)
        losses, theirs = (torch.stack(list(x.losses.values())).detach() for x in (in_use, whole))
        dist.all_reduce(losses)
        if not close(losses / dist.get_world_size(), theirs, bound):
            wrong.append("losses")
        gathered = gradients(model)
        wrong += [
            name
            for name, x in expected.items()
            if name not in gathered or not close(gathered[name], x, bound)
        ]
        # FSDP2 reduces zeros where a unit has no gradient in the requested backward.
        wrong += sorted(name for name in gathered.keys() - expected.keys() if gathered[name].any())
    return wrong


def compare_all(kind: str, cases: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Run :func:`compare` for cases by ``trained`` and ``wrapped``; return the differences by case."""
    differences = {}
    for case in cases:
        options = dict(case)
        make = partial(built, kind, options.pop("trained"))
        differences[str(case)] = compare(make, WRAPPED[options.pop("wrapped")], **options)
    return {case: wrong for case, wrong in differences.items() if wrong}


def compare_adapters(kind: str) -> list[str]:
    """Run :func:`compare` for adapters of indexers, with transformers' layers frozen."""
    return [
        name
        for before in (True, False)
        for name in compare(partial(adapted, kind), WRAPPED["layers"], before)
    ]


def compare_loaded(kind: str, folder: str, trained: str, bound: float, **distributed: Any) -> list[str]:
    """Run :func:`compare` for a model that transformers itself shards when it loads it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    def load(_: Any) -> Any:
        options = {"distributed_config": DistributedConfig(**distributed), "attn_implementation": "sdpa"}
        model = AutoModelForCausalLM.from_pretrained(folder, **options).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(TRAINED[trained](name))
        return model

    return compare(partial(built, kind, trained), load, bound=bound)


def compare_mixed_precision(kind: str) -> list[str]:
    """Return names of bf16 gradients that differ from layers that stay gathered, which need no hook."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    both = []
    for reshard in (True, False):
        model = shard(built(kind, "indexers"), "", mp_policy=policy, reshard_after_forward=reshard)
        step(model, apply_dsa(model, stage="warmup", loss_coeff=COEFFICIENT), tokens())
        both.append(gradients(model))
    ours, expected = both
    assert expected
    return [name for name, x in expected.items() if not torch.equal(ours[name], x)]


def compare_a_reader(kind: str) -> list[str]:
    """Return names of gradients that differ if only layer 1's loss, of layer 0's selection, runs backward.

    Only layer 0 and the model are FSDP2 units, so layer 1's loss passes no output of a unit.
    """
    both = []
    for wrapped in (True, False):
        model = built(kind, "all")
        if wrapped:
            fully_shard(model.model.layers[0], reshard_after_forward=True)
            fully_shard(model)
        in_use = apply_dsa(model, loss_coeff=COEFFICIENT, indexer_loss_layers="served")
        model(input_ids=tokens(), labels=tokens(), use_cache=False)
        in_use.losses[1].backward()
        both.append(gradients(model))
    ours, expected = both
    assert expected
    return [name for name, x in expected.items() if not close(ours[name], x, 1e-4)]


def gathered_at_once(kind: str) -> list[int]:
    """Return numbers of layers with whole weights when backward reaches each layer, the last one first."""
    model = shard(built(kind, "indexers"), "")
    in_use = apply_dsa(model, stage="warmup", loss_coeff=COEFFICIENT)
    counts: list[int] = []

    def count(gradient: torch.Tensor) -> None:
        whole = [not any(isinstance(x, DTensor) for x in layer.parameters()) for layer in layers_of(model)]
        counts.append(sum(whole))

    def watch(module: Any, args: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).register_hook(count)

    for layer in layers_of(model):
        layer.register_forward_hook(watch)
    step(model, in_use, tokens())
    return counts
