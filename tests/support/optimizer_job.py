"""A tiny model trained by Megatron's schedule, DDP and optimizer; runs in the pool's workers."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.memory.measure import live_bytes, storage_bytes
from mindspeed_dsa.megatron.releases import takes
from mindspeed_dsa.parallel.local_shards import local_of
from tests.support.model import _forward_step_of, config, gpt_model, samples, start

MICROBATCHES = 2
RANKS_OF_DATA = 4  # the global batch is the same for 1, 2 and 4 ranks
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Job:
    """Model and optimizer, ready to train."""

    cfg: Any
    model: Any
    optimizer: Any
    ddp: Any

    @property
    def parts(self) -> list[Any]:
        """Megatron's optimizers inside the chain: dense parameters, experts."""
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))


def build(switches: Mapping[str, Any] | None = None, ep: int = 1, **options: Any) -> Job:
    """Start the features and :func:`assemble` the job."""
    start(switches, ep=ep)
    return assemble(ep=ep, **options)


def assemble(
    distributed: bool = False,
    overlap: bool = False,
    clip: float = 1.0,
    precision: str = "bf16",
    ep: int = 1,
    overrides: Mapping[str, Any] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    ddp_options: Mapping[str, Any] | None = None,
    empty: bool = False,
    fsdp2: bool = False,
) -> Job:
    """Build model, DDP and optimizer, after :func:`start`.

    ``empty`` gives the model parameters without elements: the first, one in the middle, the last. ``fsdp2``
    uses Megatron's FSDP2 wrapper in place of DDP.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    dtype = DTYPES[precision]
    types = {"bf16": precision == "bf16", "fp16": precision == "fp16", "params_dtype": dtype}
    cfg = config(**types, pipeline_dtype=dtype, expert_model_parallel_size=ep, **(overrides or {}))
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_param_gather=overlap,
        **{"bucket_size": 10_000, "overlap_grad_reduce": overlap, **(ddp_options or {})},
    )
    model = gpt_model(cfg)
    if empty:
        for module, shape in ((model, (0, 8)), (model.decoder, (3, 0)), (model.output_layer, (0,))):
            module.register_parameter("empty", torch.nn.Parameter(torch.empty(shape)))
    if precision != "fp32":
        model = Float16Module(cfg, model)
    if fsdp2:  # 0.12 lacks it
        from megatron.core.distributed import (
            TorchFullyShardedDataParallel,
            TorchFullyShardedDataParallelConfig,
        )

        ddp_config = TorchFullyShardedDataParallelConfig()
        model = TorchFullyShardedDataParallel(cfg, ddp_config, model)
    else:
        model = DistributedDataParallel(cfg, ddp_config, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            use_distributed_optimizer=distributed,
            # Before 0.14 only DDP has this.
            **({"overlap_param_gather": overlap} if takes(OptimizerConfig, "overlap_param_gather") else {}),
            clip_grad=clip,
            loss_scale=1.0,  # a constant scale, to enable the check for infinite gradients
            **{"optimizer": "adam", "lr": 2e-3, "weight_decay": 0.1, **types, **(optimizer_options or {})},
        ),
        [model],
    )
    cfg.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        cfg.no_sync_func = model.no_sync
        cfg.param_sync_func = None
    return Job(cfg, model, optimizer, ddp_config)


def step(
    job: Job, number: int, spoil: bool = False, gradients: Callable[[Job, int], list[float]] | None = None
) -> dict[str, Any]:
    """Run one training step, as in Megatron's loop.

    Args:
        job: job to train.
        number: step's number; it selects the samples.
        spoil: whether to make a gradient infinite.
        gradients: function that forms gradients in place of :func:`forward_backward` and returns losses.
    """
    losses = (gradients or forward_backward)(job, number)
    if spoil:
        for parameter in job.model.parameters():
            parameter.main_grad.fill_(float("inf"))
    successful, norm, _ = job.optimizer.step()
    return {"loss": losses, "norm": norm, "successful": successful}


def forward_backward(job: Job, number: int) -> list[float]:
    """Run the first part of a step, up to complete gradients; return the losses."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    job.model.zero_grad_buffer()
    job.optimizer.zero_grad()
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    batch = samples(MICROBATCHES * RANKS_OF_DATA, seed=number)
    # [microbatch, rank, sample, token]: this rank's samples of each microbatch.
    mine = batch.view(MICROBATCHES, ranks, RANKS_OF_DATA // ranks, -1)[:, rank]
    losses = get_forward_backward_func()(
        forward_step_func=partial(_forward_step_of, job.cfg),
        data_iterator=iter(list(mine)),
        model=job.model,
        num_microbatches=MICROBATCHES,
        seq_length=mine.size(-1) - 1,
        micro_batch_size=mine.size(1),
        forward_only=False,
    )
    return [float(each["lm loss"]) for each in losses]


def drawn_gradients(job: Job, number: int) -> list[float]:
    """Fill in random gradients of the only rank, for tests of the optimizer; return no losses."""
    job.model.zero_grad_buffer()
    job.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(number)
    for parameter in job.model.parameters():
        parameter.main_grad.normal_(generator=generator)
    return []


def train(
    steps: int = 10,
    skip: int | None = None,
    load: tuple[str, str] | None = None,
    save: tuple[str, str] | None = None,
    first: int = 0,
    block: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, from and to a checkpoint ``(way, folder)`` if given; return all comparable results."""
    from mindspeed_dsa.features.memory.reuse_fp32_param import shared_storage

    usual = shared_storage.default_block
    shared_storage.default_block = usual if block is None else lambda device: block
    job = build(**options)
    shared_storage.default_block = usual
    if load:
        load_from(job, *load)
    before = state(job) if load else {}
    records = [step(job, number, spoil=number == skip) for number in range(first, first + steps)]
    if save:
        save_to(job, *save)
    return {"records": records, "loaded": before, "placed": places(job), **state(job)}


def fail_in_the_step(**options: Any) -> dict[str, Any]:
    """Let the inner optimizer raise before any change; return whether weights are weights again."""
    job = build(**options)
    step(job, 0)
    before = state(job)

    def unlucky(*unused: Any) -> None:
        raise ValueError("out of luck")

    job.parts[0].optimizer.step = unlucky
    error = ""
    try:
        step(job, 1)
    except ValueError as raised:
        error = str(raised)
    after = state(job)  # gathered: other shards of the buckets come back from their owners
    same = after["masters"] == before["masters"] and (
        job.ddp.use_distributed_optimizer or after["weights"] == before["weights"]
    )
    return {"error": error, "shard is as before": same, "placed": places(job)}


def reload(from_state_dict: bool = False, **options: Any) -> dict[str, Any]:
    """Set weights from outside after two steps, then make two more; with ``state_dict`` in fp32."""
    job = build(**options)
    for number in range(2):
        step(job, number)
    state_dict = {}
    with torch.no_grad():
        for place, (name, parameter) in enumerate(job.model.module.module.named_parameters()):
            generator = torch.Generator().manual_seed(place)
            state_dict[name] = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(state_dict[name])
    job.optimizer.reload_model_params(state_dict=state_dict if from_state_dict else None)
    reloaded = state(job)
    return {"reloaded": reloaded, "records": [step(job, number) for number in (2, 3)], **state(job)}


def step_after_undo(switches: Mapping[str, Any]) -> str:
    """Return the error of an optimizer whose feature was switched off underneath it."""
    import mindspeed_dsa

    job = build(switches)
    step(job, 0)
    mindspeed_dsa.disable()
    mindspeed_dsa.enable(experimental_attention_variant="dsa")
    try:
        step(job, 1)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def error_of_build(**options: Any) -> str:
    """Return the error of building an optimizer that does not combine with the feature."""
    try:
        build(**options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def state(job: Job) -> dict[str, Any]:
    """Gather weights; return digests of this rank's weights, master weights and moments."""
    gather(job)
    weights = {name: digest(parameter) for name, parameter in job.model.named_parameters()}
    masters, moments = [], []
    for part in job.parts:
        for group in part.optimizer.param_groups:
            masters += [digest(value) for value in map(partial(master_value, part), group["params"])]
            for parameter in group["params"]:
                entry = part.optimizer.state.get(parameter, {})
                moments += [digest(entry[key]) for key in ("exp_avg", "exp_avg_sq") if key in entry]
    return {"weights": weights, "masters": masters, "moments": moments}


def gather(job: Job) -> None:
    """Gather weights as Megatron's loop does before it saves or evaluates, if gathering overlaps forward."""
    if job.ddp.overlap_param_gather:
        job.model.start_param_sync(force_sync=True)


def master_value(part: Any, tensor: Tensor) -> Tensor:
    """Return the fp32 weight, from its place."""
    from mindspeed_dsa.megatron.optimizer import state_of

    shared, swapped = state_of(part, "reuse-fp32-param"), state_of(part, "swap-optimizer")
    if swapped is not None:
        return swapped.master(tensor)
    return tensor if shared is None else shared.masters.values(tensor)


def places(job: Job) -> dict[str, Any]:
    """Return the places of state, as far as its tensors tell.

    Returns:
        ``voided``: whether every tensor in place of a master weight reads as NaN and owns nothing; ``moments
        on the host``: share of the moments' elements in the pool.
    """
    from mindspeed_dsa.platforms import host_pool

    groups = [(part, group) for part in job.parts for group in part.optimizer.param_groups]
    mains = [local_of(main) for _, group in groups for main in group["params"]]
    moments = [
        local_of(part.optimizer.state[main][key])
        for part, group in groups
        for main in group["params"]
        for key in ("exp_avg", "exp_avg_sq")
    ]
    return {
        "voided": all(bool(main.isnan().all()) and main.untyped_storage().nbytes() == 4 for main in mains),
        "moments on the host": sum(each.numel() for each in moments if host_pool.shared.holds(each))
        / sum(each.numel() for each in moments),
        "optimizers": len(job.parts),
    }


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 digest of a tensor's bytes, or of its shard on this rank."""
    data = local_of(tensor).detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def bytes_at_rest(**options: Any) -> dict[str, float]:
    """Return bytes of live storages and of the pool, without gradients, after two steps; and parameters."""
    from mindspeed_dsa.platforms import host_pool

    before, host = live_bytes(), host_pool.shared.figures().in_use
    job = build(**options)
    for number in range(2):
        step(job, number)
    job.optimizer.zero_grad()
    gradients = [buffer.grad_data for buffer in (*job.model.buffers, *job.model.expert_parallel_buffers)]
    gc.collect()
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    return {
        "bytes": live_bytes() - before - storage_bytes(gradients),
        "parameters": parameters,
        "host": host_pool.shared.figures().in_use - host,
    }


def legacy_state(switches: dict[str, Any]) -> dict[str, Any]:
    """Read parameter states in the format from before February 2024, after a step."""
    job = build(switches, distributed=True)
    step(job, 0)
    for part in job.parts:
        generator = torch.Generator().manual_seed(1)
        old = {
            index: {
                torch.float32: {
                    key: [torch.rand(bucket.numel_unpadded, generator=generator) for bucket in buffer.buckets]
                    for key in ("param", "exp_avg", "exp_avg_sq")
                }
            }
            for index, buffer in enumerate(part.buffers)
        }
        part.load_parameter_state_from_dp_zero(old, update_legacy_format=True)
    loaded = state(job)
    return {"loaded": loaded, "record": step(job, 1), **state(job)}


def without_memory(switches: dict[str, Any]) -> str:
    """Return the error of building an optimizer on a host whose memory is full."""
    from mindspeed_dsa.platforms import host_pool

    with mock.patch.object(host_pool, "host_memory_free", return_value=0):
        return error_of_build(switches=switches)


# -- saving and loading as Megatron's training loop does it, by each of its formats ---------------

PLAIN = "torch_dist"  # without the distributed optimizer
TORCH = "torch"  # the old format: state dicts and, for the distributed optimizer, a file of parameter states


def save_to(job: Job, way: str, folder: str) -> None:
    """Save as ``torch``, or by a sharding type of the distributed optimizer in torch_dist."""
    from megatron.core import parallel_state

    gather(job)
    if way == TORCH:
        state, parameters = _files(folder)
        if parallel_state.get_expert_data_parallel_rank() == 0:
            content = {"model": job.model.state_dict_for_save_checkpoint()}
            torch.save({**content, "optimizer": job.optimizer.state_dict()}, state)
        if job.ddp.use_distributed_optimizer:
            job.optimizer.save_parameter_state(parameters)
        torch.distributed.barrier()
        return
    from dsa_job.torch_dist import save_in_this_process
    from megatron.core import dist_checkpointing

    # Megatron's writer requires psutil.
    dist_checkpointing.save(_sharded(job, way, is_loading=False), folder, save_in_this_process())


def load_from(job: Job, way: str, folder: str, weights_alone: bool = False) -> None:
    """Load the files of :func:`save_to`; model first, then optimizer, as in Megatron."""
    if way == TORCH:
        state = torch.load(_files(folder)[0], weights_only=False)
    else:
        from megatron.core import dist_checkpointing

        weights = {"model": job.model.module.sharded_state_dict()} if weights_alone else None
        state = dist_checkpointing.load(weights or _sharded(job, way, is_loading=True), folder)
    job.model.load_state_dict(state["model"])
    if weights_alone:
        job.optimizer.reload_model_params()
        return
    job.optimizer.load_state_dict(state["optimizer"])
    if way == TORCH and job.ddp.use_distributed_optimizer:
        job.optimizer.load_parameter_state(_files(folder)[1])


def _files(folder: str) -> tuple[str, str]:
    """Return this expert parallel rank's files; as in Megatron, all of its replicas share them."""
    from megatron.core import parallel_state

    rank = parallel_state.get_expert_model_parallel_rank()
    return str(Path(folder, f"state-{rank}.pt")), str(Path(folder, f"parameters-{rank}.pt"))


def _sharded(job: Job, way: str, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": way, "chained_optim_avoid_prefix": True}
    # FSDP2's optimizers take the distributed optimizer's formats.
    fsdp2 = hasattr(job.ddp, "reshard_after_forward")
    if way == PLAIN or not (job.ddp.use_distributed_optimizer or fsdp2):
        metadata.pop("distrib_optim_sharding_type")
    model = job.model.module.sharded_state_dict()
    how: dict[str, Any] = {"metadata": metadata}
    if not takes(type(job.parts[0]).sharded_state_dict, "metadata"):  # before 0.14
        how = {"sharding_type": way} if job.ddp.use_distributed_optimizer else {}
    optimizer = job.optimizer.sharded_state_dict(model, is_loading=is_loading, **how)
    return {"model": model, "optimizer": optimizer}
