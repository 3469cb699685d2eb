"""Distributed checkpoints (``torch_dist``) that a killed process cannot damage.

A checkpoint is written under a temporary name, brought to the disk, and renamed; then the tracker
file is replaced. Whatever is killed when, the tracker names a complete checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy

# Derives from BaseException: no handler for ordinary errors sees it.
from torch.distributed.checkpoint.api import CheckpointException as DamagedError

from dsa_job.checkpoint_files import TRACKER, complete_steps, folder_of, is_complete, latest, partial_name
from dsa_job.errors import UsageError
from dsa_job.files import sync_folder, sync_tree, write_atomically
from dsa_job.model import unwrapped

# What must agree between a checkpoint and the job that loads its weights.
_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "qk_layernorm",
    "normalization",
    "experimental_attention_variant",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "num_moe_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
    "mtp_num_layers",
    "untie_embeddings_and_output_weights",
)
_OPTIMIZER = (
    "optimizer",
    "bf16",
    "use_distributed_optimizer",
)
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "world_size",
)


class _SaveInThisProcess(SaveShardedStrategy):
    """Megatron's ``torch_dist`` format through torch's own writer.

    Megatron's writer starts helper processes that outlive a killed parent and keep its output pipes
    open; these checkpoints do not need them.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch.distributed.checkpoint.save(
            torch_strategies.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=torch.distributed.checkpoint.FileSystemWriter(checkpoint_dir),
            planner=torch_strategies.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


@dataclass
class Progress:
    """How far a job has come; saved with every checkpoint.

    Attributes:
        iteration: steps done.
        consumed_train_samples: sequences used by all ranks together.
        wall_s: seconds spent in all processes that worked on this run, one after the other.
        fresh_optimizer: the weights were loaded, the optimizer's state was not; never saved.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    wall_s: float = 0.0
    fresh_optimizer: bool = False


def choose(args: argparse.Namespace) -> int:
    """The step that ``--load`` and ``--ckpt-step`` mean.

    Raises:
        UsageError: there is no such checkpoint.
    """
    folder = Path(args.load)
    step = args.ckpt_step if args.ckpt_step is not None else latest(folder)
    if step is None or not is_complete(folder_of(folder, step)):
        raise UsageError(
            f"--load {folder} has no complete checkpoint{'' if step is None else f' of step {step}'}; "
            f"complete ones: {complete_steps(folder) or 'none'}"
        )
    return step


def check_fits(args: argparse.Namespace, checkpoint: Path) -> None:
    """Compare the arguments that made a checkpoint with those of this job; reads, and changes nothing.

    Raises:
        UsageError: the checkpoint cannot be read, or lists everything that differs.
    """
    try:
        json.loads((checkpoint / "metadata.json").read_bytes())  # Megatron reads it too, with a traceback
        saved = dist_checkpointing.load_common_state_dict(str(checkpoint)).get("args")
    except Exception as error:  # whatever the pickle of an unknown file may raise
        raise UsageError(
            f"checkpoint {checkpoint} cannot be read ({error}); choose another with --ckpt-step"
        ) from error
    if saved is None:
        return
    names = [*_SHAPE, *([] if weights_only(args) else _OPTIMIZER)]
    differences = [
        f"{name} is {getattr(args, name)} here and {getattr(saved, name)} there"
        for name in names
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name)
    ]
    if differences:
        shape = any(difference.split()[0] in _SHAPE for difference in differences)
        remedy = (
            "use the same model" if shape else "add --no-load-optim or --finetune to load the weights only"
        )
        raise UsageError(f"checkpoint {checkpoint} does not fit: {'; '.join(differences)}; {remedy}")


def weights_only(args: argparse.Namespace) -> bool:
    """Whether the optimizer's state stays out of a load."""
    return bool(args.finetune or args.no_load_optim)


def save(
    args: argparse.Namespace,
    folder: Path,
    progress: Progress,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
) -> Path:
    """Write a checkpoint; all ranks call it together. Returns its folder."""
    final = folder_of(folder, progress.iteration)
    name = [partial_name(final)]
    dist.broadcast_object_list(name, src=0)
    partial = folder / name[0]
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    dist.barrier()
    metadata = _metadata(args)
    state = _model_state(model, metadata)
    if not args.no_save_optim:
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
        state["opt_param_scheduler"] = scheduler.state_dict()
    if not args.no_save_rng:
        state["rng_state"] = _rng_state()
    saved = argparse.Namespace(**vars(args))
    saved.consumed_train_samples = progress.consumed_train_samples
    saved.world_size = dist.get_world_size()
    state.update(args=saved, iteration=progress.iteration, checkpoint_version=3.0, wall_s=progress.wall_s)
    content = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save(state, str(partial), _SaveInThisProcess(), content_metadata=content)
    dist.barrier()
    if dist.get_rank() == 0:
        sync_tree(partial)
        _publish(partial, final)
        write_atomically(folder / TRACKER, str(progress.iteration))
    dist.barrier()
    return final


def _publish(partial: Path, final: Path) -> None:
    if final.exists():
        # Left by a process that was killed before the tracker named it, or by an earlier run of the
        # same steps; the tracker does not change until the new one is in place.
        old = partial.with_suffix(".replaced")
        os.rename(final, old)
        os.rename(partial, final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(partial, final)
    sync_folder(final.parent)


def load(
    args: argparse.Namespace,
    checkpoint: Path,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
) -> Progress:
    """Read a checkpoint into model, optimizer, schedule and generators, in any parallel layout.

    Raises:
        UsageError: its tensors do not fit the model, or its files cannot be read.
    """
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    saved = common.get("args")
    with_optimizer = not weights_only(args) and not getattr(saved, "no_save_optim", False)
    layout = {name: getattr(args, name, None) for name in _LAYOUT} | {"world_size": dist.get_world_size()}
    with_rng = (
        not (args.finetune or args.no_load_rng or getattr(saved, "no_save_rng", False))
        and saved is not None
        and all(getattr(saved, name, None) == value for name, value in layout.items())
    )
    metadata = {**(dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}), **_group()}
    wanted = _model_state(model, metadata)
    if with_optimizer:
        wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    if with_rng:
        wanted["rng_state"] = _rng_state()
    try:
        state = dist_checkpointing.load(wanted, str(checkpoint))
    except (CheckpointingException, KeyError) as error:
        raise UsageError(f"checkpoint {checkpoint} does not fit this model: {error}") from error
    except DamagedError as error:  # names every rank's trouble, each with a traceback
        causes = {cause for cause, _ in error.failures.values()}
        if all(isinstance(cause, KeyError) and "optimizer." in str(cause) for cause in causes):
            raise UsageError(
                f"checkpoint {checkpoint} has no optimizer state for some of these parameters, as one of "
                "--dsa-stage warmup, which trains the indexers alone; add --finetune to take its weights only"
            ) from error
        told = "; ".join(sorted({f"{type(cause).__name__}: {cause}" for cause in causes}))
        step = int(checkpoint.name[5:])
        others = [other for other in complete_steps(checkpoint.parent) if other != step]
        raise UsageError(
            f"checkpoint {checkpoint} cannot be read, its files are damaged ({told}); go on from another "
            f"with --load {checkpoint.parent} --ckpt-step, which has: {others or 'none'}"
        ) from error
    for index, chunk in enumerate(model):
        unwrapped(chunk).load_state_dict(state[_key(index, len(model))], strict=True)
    if with_optimizer:
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        optimizer.reload_model_params()
    if with_rng:
        _set_rng_state(state["rng_state"])
    if args.finetune:
        return Progress(fresh_optimizer=True)
    return Progress(
        iteration=state["iteration"],
        consumed_train_samples=getattr(saved, "consumed_train_samples", 0),
        wall_s=state.get("wall_s", 0.0),
        fresh_optimizer=not with_optimizer,
    )


def _group() -> dict[str, Any]:
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _metadata(args: argparse.Namespace) -> dict[str, Any]:
    """How the state is cut; a sharded optimizer's in a way that any other layout can read."""
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        **_group(),
    }
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


def _rng_state() -> ShardedObject:
    """Every generator of this rank, each rank's kept apart."""
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
