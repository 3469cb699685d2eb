"""Regions of a model's tensors that a rank holds, and Hugging Face's files read into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
from mindspeed_dsa.features.checkpoints.hugging_face.names import Place, place_of
from mindspeed_dsa.runs.files import RunError

THREADS = 2
"""Each holds a tensor. While one waits for the disk or the kernel copies for it, another computes."""
Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Piece:
    """A region of a tensor, as Megatron's checkpoints place it.

    Attributes:
        place: which tensor.
        key: of the tensor in a checkpoint, which may be a stack of several.
        size: of what the key names.
        offset: of the region in that.
        shape: of the region, with 1 along the axes of a stack.
        stacked: how many of the first axes are stacks.
        data: the region, without the axes of stacks.
    """

    place: Place
    key: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stacked: int
    data: Tensor

    @property
    def begin(self) -> tuple[int, ...]:
        """Return where the region begins in its tensor."""
        return self.offset[self.stacked :]

    @property
    def whole(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return self.size[self.stacked :]


def state_of(model: Any, megatron: Megatron) -> Mapping[str, Any]:
    """Return a model's sharded state dict; a stage that repeats the embedding has to be told its replicas."""
    replicas = megatron("core.parallel_state").get_data_parallel_group(with_context_parallel=True)
    found: Mapping[str, Any] = model.sharded_state_dict(metadata={"dp_cp_group": replicas})
    return found


def pieces_of(state: Mapping[str, Any], megatron: Megatron) -> Iterator[tuple[Any, list[Piece]]]:
    """Yield the entries of a model's sharded state dict that are tensors, each with its regions.

    A gated projection is one parameter and two regions: gate and up.

    Args:
        state: of ``sharded_state_dict`` of a model.
        megatron: whose.

    Raises:
        UnknownName: a tensor has no counterpart in Hugging Face's files.
    """
    mapping: Any = megatron("core.dist_checkpointing.mapping")
    for entry in state.values():
        if isinstance(entry, mapping.ShardedTensorFactory):
            yield entry, [_piece(shard) for shard in _leaves(entry.build())]
        elif isinstance(entry, mapping.ShardedTensor):
            yield entry, [_piece(entry)]


def _leaves(built: Any) -> list[Any]:
    """List the shards that a factory has built."""
    if isinstance(built, Mapping):
        return [shard for each in built.values() for shard in _leaves(each)]
    if isinstance(built, (list, tuple)):
        return [shard for each in built for shard in _leaves(each)]
    return [built]


def _piece(shard: Any) -> Piece:
    place, stacked = place_of(shard.key, shard.global_offset)
    if stacked != shard.prepend_axis_num:
        raise RunError(
            f"mindspeed_dsa weights: {shard.key} has {shard.prepend_axis_num} stacked axes, and its name "
            f"says {stacked}: this release of Megatron stacks what the table of names does not know"
        )
    shape = (*[1] * stacked, *shard.local_shape)
    return Piece(place, shard.key, shard.global_shape, shard.global_offset, shape, stacked, shard.data)


def read_piece(piece: Piece, files: Reader, layers: int, out: Tensor | None = None) -> Tensor:
    """Read a region from Hugging Face's files.

    Args:
        piece: region to read.
        files: of the whole model.
        layers: of its decoder.
        out: tensor of the region's shape to fill; None: the mapped file's memory if that has the region in
            its dtype, else a new tensor.
    """
    parts = list(_parts(piece, files, layers))
    rows = piece.data.size(0)
    columns = (piece.begin[1], piece.begin[1] + piece.data.size(1)) if piece.data.dim() > 1 else None
    if out is None:
        if len(parts) == 1:
            ((name, begin, end),) = parts
            if end - begin == rows and files.dtype(name) == piece.data.dtype:
                return files.read(name, begin, end, columns)
        out = torch.empty(piece.data.shape, dtype=piece.data.dtype)
    filled = 0
    for name, begin, end in parts:
        files.read_into(out[filled : filled + end - begin], name, begin, columns)
        filled += end - begin
    out[filled:].zero_()  # rows of a padded vocabulary
    return out


def _parts(piece: Piece, files: Reader, layers: int) -> Iterator[tuple[str, int, int]]:
    """Yield Hugging Face's tensors that a region lies in, with their rows' begin and end."""
    first, last, start = piece.begin[0], piece.begin[0] + piece.data.size(0), 0
    for name in piece.place.theirs(layers):
        rows = files.shape(name)[0]
        begin, end = max(first - start, 0), min(last - start, rows)
        if begin < end:
            yield name, begin, end
        start += rows


def fill(state: Mapping[str, Any], files: Reader, layers: int, megatron: Megatron) -> int:
    """Read the weights of a model, as far as this rank holds them, into its parameters.

    Args:
        state: of ``sharded_state_dict`` of the model; it shares memory with the parameters.
        files: of the whole model.
        layers: of its decoder.
        megatron: whose.

    Returns:
        Bytes that were filled.
    """
    filled = 0
    for entry, pieces in pieces_of(state, megatron):
        if any(name not in files.names for piece in pieces for name in piece.place.theirs(layers)):
            continue  # indexers of a dense model's files; what else is missing has been refused
        for piece in pieces:
            if not _within(piece.data, entry.data):
                raise RunError(
                    f"mindspeed_dsa: --load-hf: Megatron's {piece.key} is a copy of the model's parameter, "
                    "which cannot be filled through it; use `python -m mindspeed_dsa weights import`"
                )
            if piece.data.device.type == "cpu":
                read_piece(piece, files, layers, piece.data)
            else:
                piece.data.copy_(read_piece(piece, files, layers))
            filled += piece.data.nbytes
    return filled


def _within(part: Tensor, whole: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return part.numel() == 0 or part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def in_threads(do: Callable[[Work], Result], works: Iterable[Work]) -> Iterator[Result]:
    """Yield the results of a function in the order of its arguments; the first problem is raised.

    Torch computes with one thread in each of these: their tensors are small, and handing halves of every
    operation to another core takes longer than the operation.

    Args:
        do: function that several threads call.
        works: its arguments.
    """
    of_torch = torch.get_num_threads()
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(do, works)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(of_torch)  # also of threads that are made later
