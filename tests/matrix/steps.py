"""Training steps of a small MLA + DSA + MoE model on any release; they run inside the pool's workers."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import mindspeed_dsa
from mindspeed_dsa import session
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa.indexer_loss import indexer_loss
from mindspeed_dsa.features.moe import numbering
from mindspeed_dsa.ops import backend
from mindspeed_dsa.parallel.local_shards import local_of
from tests.features.attention.context_parallel import dense_model as dense
from tests.features.compilation.regions import compiled_steps as regions
from tests.features.dsa import cp_cases
from tests.features.dsa.stages import jobs_by_stage as stages
from tests.matrix import model as tiny
from tests.matrix.record import at_work
from tests.support import memory_events, optimizer_job
from tests.support import model as job
from tests.support.contexts import running

MODEL = {
    "num_layers": 4,
    "moe_layer_freq": [0, 1, 0, 1],
    # With few index heads exact ties are common, and kernels break them differently.
    "dsa_indexer_n_heads": 16,
}
TWO_AND_MTP = {
    "num_layers": 2,
    "moe_layer_freq": [0, 1],
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.1,
}


def step(
    switches: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Run :func:`tiny.one_step` with four layers, and add the features' activity."""
    overrides = {**MODEL, **(overrides or {})}
    layout = {name: arguments[name] for name in ("ep", "etp") if name in arguments}
    overrides |= {EXPERT_SIZES[name]: size for name, size in layout.items()}
    compiles = (switches or {}).get("compile_regions", False)
    with job_of_any_release(arguments.get("cp", 1), (switches or {}).get("cp_block_rows", 0)):
        before = backend.calls()
        with (
            memory_events.counted() as counts,
            own_loop(),
            regions.operator_by_operator() if compiles else contextlib.nullcontext(),
        ):
            result = tiny.one_step(switches, overrides, **arguments)
            # Before the patches of the counters end, which would look like other code's patches.
            working = at_work()
        for (operator, _), calls in (backend.calls() - before).items():
            counts[f"operator {operator}"] += calls
        found = {**result, "counts": dict(counts), "ahead": ahead(), "at work": working}
        return {**found, "compiled": compiled() if compiles else []}


EXPERT_SIZES = {"ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}


def numbered_experts(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return :func:`job.global_names` with the experts' global numbers."""
    from megatron.core import parallel_state

    rank, named = parallel_state.get_expert_model_parallel_rank(), {}
    first = model.decoder.layers[0].layer_number - 1
    for name, parameter in _names_in_layers(model).items():
        match = re.match(r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)", name)
        if match:
            experts = model.decoder.layers[int(match[1]) - first].mlp.experts
            number = numbering.experts_of(experts, rank)[int(match[2])]
            name = name.replace(f"local_experts.{match[2]}", f"local_experts.{number}")
        named[name] = parameter
    return named


_names_in_layers = job.global_names


@contextlib.contextmanager
def job_of_any_release(cp: int, block_rows: int) -> Iterator[None]:
    """Patch configurations and context parallel positions so that they work on every release."""
    own_positions = cp_cases.positions_in_blocks(block_rows) if block_rows else job.own_positions
    with (
        mock.patch.object(tiny, "config", tiny.config_with_experts),
        cp_cases.context_parallel(tiny, cp),
        mock.patch.object(job, "own_positions", own_positions),
        mock.patch.object(job, "global_names", numbered_experts),
    ):
        yield


@contextlib.contextmanager
def own_loop() -> Iterator[None]:
    """Tell the expert load report that this job has its own training loop."""
    from mindspeed_dsa.features.moe.load_report import steps

    start = job.start

    def start_and_tell(*args: Any, **kwargs: Any) -> None:
        start(*args, **kwargs)
        running = session.current()
        context = running.contexts.get("moe-router-load-report") if running else None
        if context is not None:
            steps.use_own_loop(context)

    with mock.patch.object(job, "start", start_and_tell):
        yield


def ahead() -> int:
    """Return how often something was recomputed ahead of its gradient."""
    from mindspeed_dsa.features.pipeline.recompute_ahead.ahead import Ahead

    context = running("recompute-ahead")
    return context.state(Ahead).recomputed["ahead"] if context else 0


def compiled() -> list[str]:
    """Return the regions that ran compiled; none may have failed."""
    every_region = regions.regions()
    assert not [each.failure for each in every_region if each.failure]
    return [each.name for each in every_region if each.compilations]


def compiled_latent_attention() -> dict[str, Any]:
    """Run a step of a dense model with latent attention by head; add the compiled regions."""
    with regions.operator_by_operator():
        result = dense.step(attention="latent", more={"compile_regions": True})
        return {**result, "compiled": compiled(), "at work": at_work()}


def reported_losses() -> dict[str, Any]:
    """Return the tracked indexer losses of two decoder layers and two MTP layers."""
    with job_of_any_release(1, 0):
        job.start()
        model = tiny.gpt_model(tiny.config(**TWO_AND_MTP))
        job.per_token_loss(model, job.samples(2)).mean().backward()
        return {"losses": indexer_loss(Megatron()).tracker.tracker["values"].tolist(), "at work": at_work()}


def steps(switches: Mapping[str, Any] | None = None) -> Iterator[list[float]]:
    """Yield the microbatch losses of two training steps, step by step."""
    with job_of_any_release(1, 0):
        job.start(switches)
        cfg = tiny.config(**MODEL)
        model = tiny.gpt_model(cfg)
        for number in range(2):
            reports = job.train_step(cfg, [model], list(job.samples(4, number).split(2)))
            yield [float(each["lm loss"]) for each in reports]


def two_steps(switches: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the losses of :func:`steps`, and the active features."""
    return {"losses": list(steps(switches)), "at work": at_work()}


def extended(**arguments: Any) -> dict[str, Any]:
    """Run :func:`step` in the layout that ``--moe-tp-extend-ep`` derives from a job's arguments."""
    args = SimpleNamespace(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        pipeline_model_parallel_size=1,
        num_experts=4,
        world_size=2,
    )
    switches = {"moe_tp_extend_ep": True}
    job.start(switches, tp=2)
    running = session.current()
    assert running is not None
    running.rewrite(args)
    mindspeed_dsa.disable()
    import_module("megatron.core.parallel_state").destroy_model_parallel()
    sizes = {"ep": args.expert_model_parallel_size, "etp": args.expert_tensor_parallel_size}
    return step(switches, tp=args.tensor_model_parallel_size, **sizes, **arguments)


def indexer_learns(steps: int) -> dict[str, Any]:
    """Train in the warmup stage; return the indexer losses and the parameters with gradients."""
    with job_of_any_release(1, 0):
        job.start({"dsa_stage": "warmup"})
        model = tiny.gpt_model(tiny.config(**MODEL))
        indexers = [p for name, p in model.named_parameters() if ".indexer." in name]
        adam = torch.optim.Adam(indexers, lr=1e-2)
        losses = []
        for _ in range(steps):
            model.zero_grad()
            job.per_token_loss(model, job.samples(4)).mean().backward()
            adam.step()
            losses.append(tiny.logged_indexer_loss(1))
        trained = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()]
        return {"losses": losses, "trained": trained, "at work": at_work()}


def stage_after_stage(**arguments: Any) -> list[dict[str, Any]]:
    """Run a job from stage to stage, through its checkpoints."""
    with (
        job_of_any_release(1, 0),
        mock.patch.object(optimizer_job, "config", tiny.config_with_experts),
        mock.patch.object(optimizer_job, "gpt_model", tiny.gpt_model),
    ):
        return stages.chain(**arguments)


def beside(case: str, **arguments: Any) -> dict[str, Any]:
    """Run another module's case, and add the active features."""
    module, _, name = case.partition(":")
    with mock.patch.object(tiny, "config", tiny.config_with_experts):
        return {"found": getattr(import_module(module), name)(**arguments), "at work": at_work()}


# -- weights sharded by FSDP2, with Megatron's optimizer ----------------------------------------

STEPS = 2


def train_sharded(switches: Mapping[str, Any] | None = None, pp: int = 1, ep: int = 1) -> dict[str, Any]:
    """Return losses and norms of all steps, gradients of the first, and FSDP2's activity.

    Weights are whole or sharded by FSDP2.

    Returns:
        Results; ``gathered ahead`` counts the units whose gather had begun when the first layer started.
    """
    switches = dict(switches or {})
    overrides = {**MODEL, "pipeline_model_parallel_size": pp, "expert_tensor_parallel_size": 1}
    with (
        job_of_any_release(1, 0),
        mock.patch.object(optimizer_job, "config", tiny.config_with_experts),
        mock.patch.object(optimizer_job, "gpt_model", tiny.gpt_model),
        memory_events.counted() as counts,
    ):
        job.start(switches, pp=pp, ep=ep, etp=1)
        fsdp2 = "use_torch_fsdp2" in switches
        made = optimizer_job.assemble(precision="fp32", ep=ep, overrides=overrides, fsdp2=fsdp2)
        gradients: dict[str, Tensor] = {}
        records = []
        with _before_the_first_layer(made.model, counts) as ahead:
            for number in range(STEPS):
                losses = optimizer_job.forward_backward(made, number)
                gradients = gradients or _gradients(made.model.module)
                _, norm, _ = made.optimizer.step()
                records.append({"losses": losses, "norm": float(norm)})
        return {
            "records": records,
            "gradients": gradients,
            "sharded": sum(isinstance(each, DTensor) for each in made.model.parameters()),
            "gathered ahead": ahead[0],
            "counts": dict(counts),
            "at work": at_work(),
        }


@contextlib.contextmanager
def _before_the_first_layer(model: torch.nn.Module, counts: Counter[str]) -> Iterator[list[int]]:
    """Record the number of gathers started before each run of this rank's first layer."""
    gathers: list[int] = []

    def note(*unused: Any) -> None:
        gathers.append(counts[memory_events.GATHERED])

    layers: Any = model.module.decoder.layers
    handle = layers[0].register_forward_pre_hook(note)
    try:
        yield gathers
    finally:
        handle.remove()


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return whole gradients, gathered from all shards, under single-rank names."""
    gradients = {}
    for name, parameter in job.global_names(model).items():
        if isinstance(parameter, DTensor):
            gradients[name] = _put_together(parameter.grad, getattr(parameter, "allreduce", True))
        else:
            gradients[name] = parameter.main_grad.clone()
    return gradients


def _put_together(shard: Any, dense: bool) -> Tensor:
    """Gather a whole tensor as ``full_tensor()`` does."""
    from megatron.core import parallel_state

    # full_tensor() would look up the groups of an equal mesh that an earlier case had.
    group = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if dense
        else parallel_state.get_expert_data_parallel_group()
    )
    (placement,) = shard.placements
    own = local_of(shard).contiguous()
    pieces = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(pieces, own, group=group)
    return torch.cat(pieces, dim=placement.dim)
