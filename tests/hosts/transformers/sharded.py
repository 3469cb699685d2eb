"""One rank of a model whose layers are wrapped, beside the same model in one process."""

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

# -- which parameters are trained --------------------------------------------------------------

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


# -- what is wrapped ---------------------------------------------------------------------------


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]


def shard(model: Any, *parts: str, **options: Any) -> Any:
    """FSDP2 of parts of each layer, by their names, and of the model; "" is the layer."""
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
    """Backward of the model's loss and the indexers', or of the indexers' alone."""
    output = model(input_ids=ids, labels=None if own_loss else ids, use_cache=False)
    (COEFFICIENT * in_use.loss if own_loss else output.loss).backward()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Whole gradients by the names that parameters have in one process."""
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
) -> list[str]:
    """Return which losses and gradients of two steps are not those of one process with the batch of all.

    Args:
        make: builds the model.
        wrap: shards it.
        before: whether it is in use before it is wrapped.
        own_loss: whether the indexers' loss alone goes backward.
        stage: of the training.
        bound: of a difference, as a share of the largest value.
    """
    options: dict[str, Any] = {"stage": stage, "loss_coeff": COEFFICIENT}
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
    own = ids.chunk(dist.get_world_size())[dist.get_rank()]
    wrong = []
    for _ in range(2):
        model.zero_grad()
        step(model, in_use, own, own_loss)
        losses, theirs = (torch.stack(list(x.losses.values())).detach() for x in (in_use, whole))
        dist.all_reduce(losses)
        if not close(losses / dist.get_world_size(), theirs, bound):
            wrong.append("losses")
        found = gradients(model)
        wrong += [
            name for name, x in expected.items() if name not in found or not close(found[name], x, bound)
        ]
        # FSDP2 reduces zeros where a unit has no gradient in the backward that the user asked for.
        wrong += sorted(name for name in found.keys() - expected.keys() if found[name].any())
    return wrong


def compare_all(kind: str, cases: list[dict[str, Any]]) -> dict[str, list[str]]:
    """:func:`compare` for cases by ``trained`` and ``wrapped``; what is wrong by case."""
    found = {}
    for case in cases:
        options = dict(case)
        make = partial(built, kind, options.pop("trained"))
        found[str(case)] = compare(make, WRAPPED[options.pop("wrapped")], **options)
    return {case: wrong for case, wrong in found.items() if wrong}


def compare_adapters(kind: str) -> list[str]:
    """The same of adapters of indexers, which transformers' layers are frozen beside."""
    return [
        name
        for before in (True, False)
        for name in compare(partial(adapted, kind), WRAPPED["layers"], before)
    ]


def compare_loaded(kind: str, folder: str, trained: str, bound: float, **distributed: Any) -> list[str]:
    """The same of a model that transformers itself shards when it loads it."""
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
    """Gradients in bf16 that differ from those of layers that stay gathered, which need no hook."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for reshard in (True, False):
        model = shard(built(kind, "indexers"), "", mp_policy=policy, reshard_after_forward=reshard)
        step(model, apply_dsa(model, stage="warmup", loss_coeff=COEFFICIENT), tokens())
        found.append(gradients(model))
    ours, expected = found
    assert expected
    return [name for name, x in expected.items() if not torch.equal(ours[name], x)]


def gathered_at_once(kind: str) -> list[int]:
    """Layers whose weights are whole when backward comes to each layer, the last one first."""
    model = shard(built(kind, "indexers"), "")
    in_use = apply_dsa(model, stage="warmup", loss_coeff=COEFFICIENT)
    found: list[int] = []

    def count(gradient: torch.Tensor) -> None:
        whole = [not any(isinstance(x, DTensor) for x in layer.parameters()) for layer in layers_of(model)]
        found.append(sum(whole))

    def watch(module: Any, args: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).register_hook(count)

    for layer in layers_of(model):
        layer.register_forward_hook(watch)
    step(model, in_use, tokens())
    return found
