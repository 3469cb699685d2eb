"""Models of any layout and their checkpoints; runs in the pool's workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.features.checkpoints.hugging_face import loading
from tests.matrix import model as tiny
from tests.matrix.hugging_face import Model, communication, poison
from tests.matrix.steps import EXPERT_SIZES, job_of_any_release
from tests.support import model as job


def differing(model: Model, switches: Mapping[str, Any], files: str, checkpoint: str, **layout: int) -> Any:
    """Read a model's weights from its files, and again from the checkpoint imported from these files.

    Args:
        model: model to build.
        switches: switches of our features.
        files: folder of the files.
        checkpoint: folder of the checkpoint, which Megatron's own function reads.
        layout: sizes of the groups of ranks.

    Returns:
        The number of this rank's tensors, and the names of those that differ.
    """
    with _chunk(model, switches, files, **layout) as chunk:
        from megatron.core import dist_checkpointing

        first = {name: tensor.clone() for name, tensor in _weights(chunk)}
        poison(chunk, (tensor for _, tensor in _weights(chunk)))
        loaded = dist_checkpointing.load({"model": chunk.sharded_state_dict()}, checkpoint)
        chunk.load_state_dict(loaded["model"])
        second = dict(_weights(chunk))
        assert not any(tensor.isnan().any() for tensor in first.values())
        return len(first), [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


def save(model: Model, switches: Mapping[str, Any], files: str, checkpoint: str, **layout: int) -> None:
    """Read a model's weights from its files, and save them with Megatron.

    Args:
        model: model to build.
        switches: switches of our features.
        files: folder of the files.
        checkpoint: folder of the checkpoint.
        layout: sizes of the groups of ranks.
    """
    with _chunk(model, switches, files, **layout) as chunk:
        from dsa_job.torch_dist import save_in_this_process
        from megatron.core import dist_checkpointing

        Path(checkpoint).mkdir(exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save({"model": chunk.sharded_state_dict()}, checkpoint, save_in_this_process())


@contextmanager
def _chunk(model: Model, switches: Mapping[str, Any], files: str, **layout: int) -> Iterator[Any]:
    """Build this rank's part of a model, with its weights from the files."""
    with job_of_any_release(1, 0), mock.patch.object(tiny, "fill_by_name", poison), torch.no_grad():
        job.start(switches, **layout)
        tp, pp = layout.get("tp", 1), layout.get("pp", 1)
        sizes = {EXPERT_SIZES[name]: size for name, size in layout.items() if name in EXPERT_SIZES}
        chunk = tiny.gpt_model(
            tiny.config(
                tensor_model_parallel_size=tp,
                sequence_parallel=tp > 1,
                pipeline_model_parallel_size=pp,
                **{**model.ours(), **communication(**layout), **sizes},
            )
        )
        poison(chunk, (tensor for _, tensor in _weights(chunk)))
        loading.load([chunk], Path(files), chunk.config, log.get())
        yield chunk


def _weights(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("expert_bias"))
