"""Megatron's distributed checkpoints (``torch_dist``), written so that a kill cannot damage them."""

from __future__ import annotations

import argparse
import errno
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException as DamagedError

from dsa_job import checkpoints
from dsa_job.distributed import from_rank_0
from dsa_job.errors import UsageError
from dsa_job.flags import FLAGS
from dsa_job.model import unwrapped
from dsa_job.torch_dist import save_in_this_process
from mindspeed_dsa.megatron.across_layouts import fitted
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.runs.whole_checkpoints import RELEASE

_SHAPE = ("padded_vocab_size", *(dest for dest, flag in FLAGS.items() if flag.shape))
_OPTIMIZER = ("optimizer", "bf16", "use_distributed_optimizer")
_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_HAS_METADATA = hasattr(dist_checkpointing, "load_content_metadata")
"""Whether checkpoints record how their state is sharded: since 0.13."""


@dataclass
class Progress:
    """State of a job that is saved with every checkpoint.

    Attributes:
        iteration: number of completed steps.
        consumed_train_samples: number of sequences used by all ranks together.
        wall_s: seconds spent on this run, summed over successive processes.
        fresh_optimizer: whether the weights were loaded without the optimizer's state; not saved.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    wall_s: float = 0.0
    fresh_optimizer: bool = False


def check_fits(args: argparse.Namespace, checkpoint: Path) -> None:
    """Check that a checkpoint can be read and fits this job.

    Raises:
        UsageError: it cannot be read, or arguments do not fit; the message lists all of them.
    """
    try:
        json.loads((checkpoint / "metadata.json").read_bytes())  # Megatron would fail on it with a traceback
        saved = dist_checkpointing.load_common_state_dict(str(checkpoint)).get("args")
    except Exception as error:  # unpickling an arbitrary file may raise anything
        raise UsageError(
            f"checkpoint {checkpoint} cannot be read ({error}); choose another with --ckpt-step"
        ) from error
    weights_only = _from_step_0(args, checkpoint) or args.no_load_optim
    names = _SHAPE if weights_only else (*_SHAPE, *_OPTIMIZER)
    if args.use_torch_fsdp2:
        # FSDP2's optimizers read master weights and moments of the distributed optimizer.
        names = tuple(name for name in names if name != "use_distributed_optimizer")
    here, there = (
        {name: getattr(of, name) for name in names if hasattr(saved, name)} for of in (args, saved)
    )
    different = [name for name, value in here.items() if value != there[name]]
    if different:
        facts = "; ".join(f"{name} is {here[name]} here and {there[name]} there" for name in different)
        model = any(name in _SHAPE for name in different)
        remedy = (
            "use the same model" if model else "add --no-load-optim or --finetune to load the weights only"
        )
        raise UsageError(f"checkpoint {checkpoint} does not fit: {facts}; {remedy}")
    if args.experimental_attention_variant:
        _check_selections(args, saved, checkpoint)


def _check_selections(args: argparse.Namespace, saved: Any, checkpoint: Path) -> None:
    """Refuse a checkpoint with other selecting layers than this job's."""
    here, there = Sharing.of(args), Sharing.of(saved)
    for layer in range(1, args.num_layers + 1):
        if here.source(layer) != there.source(layer):
            facts = f"layer {layer} {_selects(here, layer)} here and {_selects(there, layer)} there"
            raise UsageError(
                f"checkpoint {checkpoint} does not fit: {facts}; use the same --dsa-indexer-topk-freq, "
                "--dsa-indexer-skip-topk-offset or --dsa-indexer-topk-pattern"
            )


def _selects(sharing: Sharing, layer: int) -> str:
    source = sharing.source(layer)
    return "selects keys" if source == layer else f"shares those of layer {source}"


def save(
    args: argparse.Namespace,
    folder: Path,
    progress: Progress,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
) -> Any:
    """Copy the current state, and prepare its checkpoint; all ranks call this together.

    Returns:
        Megatron's ``AsyncRequest``. It writes files in any process; its finalization publishes the checkpoint
        on all ranks.
    """
    partial = from_rank_0(lambda: checkpoints.begin(folder, progress.iteration))
    metadata = _metadata(args)
    state = _model_state(model, metadata)
    if not args.no_save_optim:
        state["optimizer"] = _optimizer_state(optimizer, state, metadata)
        state["opt_param_scheduler"] = scheduler.state_dict()
    if not args.no_save_rng:
        state["rng_state"] = _rng_state()
    done = {"consumed_train_samples": progress.consumed_train_samples, "world_size": dist.get_world_size()}
    saved = argparse.Namespace(**{**vars(args), **done})
    state.update(args=saved, iteration=progress.iteration, checkpoint_version=3.0, wall_s=progress.wall_s)
    # A process group cannot be saved.
    content = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    told = {"content_metadata": content} if _HAS_METADATA else {}
    strategy = save_in_this_process()
    step = progress.iteration
    try:
        request = dist_checkpointing.save(state, str(partial), strategy, async_sharded_save=True, **told)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("PytorchStreamWriter", "inline_container", "iostream")):
            raise
        # Failed on the common state, which the first rank writes; torch does not say why.
        raise OSError(errno.EIO, "common.pt cannot be written, the disk may be full", str(partial)) from None
    request.add_finalize_fn(
        lambda: from_rank_0(lambda: checkpoints.publish(partial, step, args.verify_checkpoint))
    )
    return request


def load(
    args: argparse.Namespace, checkpoint: Path, model: list[Any], optimizer: Any, scheduler: Any
) -> Progress:
    """Load a checkpoint into model, optimizer, schedule and generators, in any parallel layout."""
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    saved = common.get("args")
    from_step_0 = _from_step_0(args, checkpoint)
    weights_only = from_step_0 or args.no_load_optim or getattr(saved, "no_save_optim", False)
    with_rng = not (from_step_0 or args.no_load_rng) and _has_rng_state(saved, args)
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) if _HAS_METADATA else None
    metadata = {**(content or {}), **_group()}
    wanted = _model_state(model, metadata)
    if not weights_only:
        wanted["optimizer"] = _optimizer_state(optimizer, wanted, metadata, is_loading=True)
    if with_rng:
        wanted["rng_state"] = _rng_state()
    try:
        state = dist_checkpointing.load(wanted, str(checkpoint))
    except (CheckpointingException, KeyError) as error:
        raise UsageError(f"checkpoint {checkpoint} does not fit this model: {error}") from error
    except DamagedError as error:  # a BaseException
        raise UsageError(_damage(checkpoint, error)) from error
    for index, chunk in enumerate(model):
        chunk.load_state_dict(state[_key(index, len(model))], strict=True)
    if not weights_only:
        optimizer.load_state_dict(fitted(optimizer.chained_optimizers, state["optimizer"]))
        # Each stage has its own learning rate; the position in the schedule is kept.
        scheduler.override_opt_param_scheduler = _stage(saved) != _stage(args)
        scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        optimizer.reload_model_params()
    if with_rng:
        _set_rng_state(state["rng_state"])
    if from_step_0:
        return Progress(fresh_optimizer=True)
    return Progress(
        iteration=state["iteration"],
        consumed_train_samples=getattr(saved, "consumed_train_samples", 0),
        wall_s=state.get("wall_s", 0.0),
        fresh_optimizer=weights_only,
    )


def _from_step_0(args: argparse.Namespace, checkpoint: Path) -> bool:
    """Return whether only the weights of a checkpoint are read."""
    return args.finetune or checkpoint.name == RELEASE


def _stage(args: Any) -> str:
    return getattr(args, "dsa_stage", None) or "sparse"


def _damage(checkpoint: Path, error: DamagedError) -> str:
    """Summarize torch's failures per rank in one sentence."""
    causes = {cause for cause, _ in error.failures.values()}
    if all(isinstance(cause, KeyError) for cause in causes):
        # Before 0.14 the experts' optimizer has another name if expert parallelism is on.
        lacking = "; ".join(sorted({str(cause) for cause in causes}))
        return (
            f"checkpoint {checkpoint} lacks state of this job ({lacking}); use the layout that wrote it, or "
            "add --no-load-optim to load the weights only"
        )
    reasons = "; ".join(sorted({f"{type(cause).__name__}: {cause}" for cause in causes}))
    others = checkpoints.complete_steps(checkpoint.parent)
    others = [step for step in others if checkpoints.folder_of(checkpoint.parent, step) != checkpoint]
    return (
        f"checkpoint {checkpoint} cannot be read, its files are damaged ({reasons}); continue from another "
        f"with --load {checkpoint.parent} --ckpt-step, which has: {others or 'none'}"
    )


def _group() -> dict[str, Any]:
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _metadata(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sharding metadata; a distributed optimizer's state is readable in any layout."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, **_group()}
    if args.use_distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def _key(index: int, chunks: int) -> str:
    return "model" if chunks == 1 else f"model{index}"


def _model_state(model: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        _key(index, len(model)): unwrapped(chunk).sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(model)
    }


def _optimizer_state(
    optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], **how: Any
) -> Any:
    told = {"metadata": metadata} if _HAS_METADATA else {}
    return optimizer.sharded_state_dict(model_state, **how, **told)


def _has_rng_state(saved: Any, args: argparse.Namespace) -> bool:
    """Return whether a checkpoint has a generator state for each rank of this layout."""
    if saved is None or getattr(saved, "no_save_rng", False):
        return False
    same = all(getattr(saved, name, None) == getattr(args, name) for name in _LAYOUT)
    return same and getattr(saved, "world_size", None) == dist.get_world_size()


def _rng_state() -> ShardedObject:
    """Return every generator state of this rank, saved separately for each rank."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng_state", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
