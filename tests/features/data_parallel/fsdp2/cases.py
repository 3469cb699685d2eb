"""What runs inside the pool's workers: DDP and FSDP2 side by side, and checkpoints from one to the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.support.checkpoints import load_from, save_to
from tests.support.model import start
from tests.support.optimizer_job import assemble, step

WAY = "fully_reshardable"
# A router of six rows, which have no quarters, and norms of nineteen weights, which have no halves.
ODD = {"num_moe_experts": 6, "kv_lora_rank": 19, "num_layers": 1, "moe_layer_freq": 1}
JOB: dict[str, Any] = {"ep": 2, "overrides": ODD}


def life(folder: str, sharding_size: int | None) -> dict[str, Any]:
    """Steps of both, a checkpoint of DDP's into FSDP2, on from there, back into DDP, and resumed."""
    start({"use_torch_fsdp2": True, "fsdp2_sharding_size": sharding_size}, ep=2)
    ddp, sharded = assemble(**JOB), assemble(**JOB, fsdp2=True)
    records = [(step(ddp, 0), step(sharded, 0))]
    from_ddp, from_fsdp2 = (_made(Path(folder, name)) for name in ("ddp", "fsdp2"))
    save_to(ddp, WAY, from_ddp)
    step(sharded, 7)  # everything is something else before it is loaded
    load_from(sharded, WAY, from_ddp)
    unequal = {"ddp to fsdp2": differing(ddp, sharded)}
    records.append((step(ddp, 1), step(sharded, 1)))
    save_to(sharded, WAY, from_fsdp2)
    step(ddp, 7)
    load_from(ddp, WAY, from_fsdp2)
    unequal["fsdp2 to ddp"] = differing(ddp, sharded)
    resumed = assemble(**JOB, fsdp2=True)
    load_from(resumed, WAY, from_fsdp2)
    unequal["resumed"] = [] if step(resumed, 2) == step(sharded, 2) else ["record"]
    unequal["resumed"] += differing(resumed, sharded)
    whole, pieces = zip(*pairs(ddp, sharded), strict=True)
    dense = [piece for piece in pieces if isinstance(piece, DTensor)]
    return {
        "records": records,
        "unequal": unequal,
        "contents": [_contents(folder) for folder in (from_ddp, from_fsdp2)],
        "share": sum(each._local_tensor.numel() for each in dense) / sum(each.numel() for each in dense),
        "dims": {each.placements[-1].dim for each in dense},
        "whole": sum(not isinstance(piece, DTensor) for piece in pieces),
        "of": len(whole),
        "units": [type(each).__name__ for each in sharded.model.modules() if isinstance(each, FSDPModule)],
    }


def _made(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return str(folder)


def _contents(folder: str) -> dict[str, tuple[int, ...]]:
    from megatron.core import dist_checkpointing

    return {key: each.global_shape for key, each in dist_checkpointing.load_tensors_metadata(folder).items()}


def pairs(one: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters of two jobs with the same model."""
    yield from zip(one.model.parameters(), other.model.parameters(), strict=True)


def differing(whole: Any, sharded: Any) -> list[str]:
    """Weights, master weights, moments and steps that are not, bit for bit, pieces of the others."""
    found = []
    for index, (theirs, ours) in enumerate(pairs(whole, sharded)):
        found += [f"weight {index}"] if not same(theirs, ours) else []
    for first, second in zip(whole.parts, sharded.parts, strict=True):
        mains = [
            [p for group in part.optimizer.param_groups for p in group["params"]] for part in (first, second)
        ]
        for index, (theirs, ours) in enumerate(zip(*mains, strict=True)):
            states = first.optimizer.state[theirs], second.optimizer.state[ours]
            found += [f"master {index}"] if not same(theirs, ours) else []
            assert states[0].keys() == states[1].keys()
            found += [f"{key} {index}" for key in states[0] if not same(states[0][key], states[1][key])]
    return found


def same(whole: Tensor, piece: Tensor) -> bool:
    if isinstance(piece, DTensor) and not isinstance(whole, DTensor):
        from mindspeed_dsa.parallel.fsdp2_shards import cut_of

        cut = cut_of(piece)
        whole = whole.chunk(cut.pieces, cut.dim)[cut.index]
    ours, theirs = (getattr(each, "_local_tensor", each) for each in (piece, whole))
    return torch.equal(ours, theirs)


def refusal(**switches: Any) -> str:
    """What building the wrapper says."""
    start({"use_torch_fsdp2": True, **switches})
    try:
        assemble(fsdp2=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
