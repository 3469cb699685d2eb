"""Regions of a model's tensors on a rank, and functions that fill them from Hugging Face's files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
from mindspeed_dsa.features.checkpoints.hugging_face.names import Place, Shape, place_of
from mindspeed_dsa.runs.files import RunError

THREADS = 2
"""Number of threads, each with one tensor: one computes while the other waits for the disk or the kernel."""
Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Piece:
    """Region of a tensor in a Megatron checkpoint.

    Attributes:
        place: position of the tensor in the model.
        key: key of the tensor in a checkpoint, which may stack several tensors.
        size: shape of the keyed tensor, stacks included.
        offset: offset of the region in the keyed tensor.
        shape: shape of the region, with 1 along the stacked axes.
        stacked: number of leading axes that are stacked.
        data: region without the stacked axes.
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
        """Return the offset of the region in its tensor, without the stacked axes."""
        return self.offset[self.stacked :]

    @property
    def whole(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor, without the stacked axes."""
        return self.size[self.stacked :]


def state_of(model: Any, megatron: Megatron) -> Mapping[str, Any]:
    """Return a model's sharded state dict."""
    # A stage that repeats the embedding needs the data parallel group to number its replicas.
    replicas = megatron("core.parallel_state").get_data_parallel_group(with_context_parallel=True)
    sharded: Mapping[str, Any] = model.sharded_state_dict(metadata={"dp_cp_group": replicas})
    return sharded


def pieces_of(state: Mapping[str, Any], megatron: Megatron) -> Iterator[tuple[Any, list[Piece]]]:
    """Yield the tensor entries of a model's sharded state dict, each with its regions.

    A gated projection is one parameter with two regions: gate and up.

    Args:
        state: sharded state dict of the model.
        megatron: Megatron package of the model.

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
    """Return a flat list of the sharded tensors that a ``ShardedTensorFactory`` has built."""
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


def read_piece(piece: Piece, files: Reader, shape: Shape, out: Tensor | None = None) -> Tensor:
    """Read the region of a Megatron tensor from Hugging Face's files.

    Args:
        piece: region to read.
        files: weights of the whole model.
        shape: layers of the model.
        out: tensor of the region's shape to fill. By default the file's mapped memory is returned if it holds
            the region contiguously in the right dtype, else a new tensor.
    """
    parts = list(_parts(piece, files, shape))
    rows = piece.data.size(0)
    columns = (piece.begin[1], piece.begin[1] + piece.data.size(1)) if piece.data.dim() > 1 else None
    if out is None:
        if len(parts) == 1:
            ((name, begin, end),) = parts
            if end - begin == rows and files.dtype(name) == piece.data.dtype:
                mapped = files.read(name, begin, end, columns)
                files.count(name, mapped)
                return mapped
        out = torch.empty(piece.data.shape, dtype=piece.data.dtype)
    filled = 0
    for name, begin, end in parts:
        files.read_into(out[filled : filled + end - begin], name, begin, columns)
        filled += end - begin
    out[filled:].zero_()  # rows of a padded vocabulary
    return out


def _parts(piece: Piece, files: Reader, shape: Shape) -> Iterator[tuple[str, int, int]]:
    """Yield the Hugging Face tensors that overlap the region, each with its first row and end row."""
    # Rows of gate and up, one above the other: with 8 rows each, region 6:10 is gate 6:8 and up 0:2.
    first, last, start = piece.begin[0], piece.begin[0] + piece.data.size(0), 0
    for segment in shape.segments(piece.place, piece.whole[0]):
        # Files have fewer rows than a padded embedding.
        rows = min(segment.last, files.shape(segment.name)[0]) - segment.first
        begin, end = max(first - start, 0), min(last - start, rows)
        if begin < end:
            yield segment.name, segment.first + begin, segment.first + end
        start += segment.last - segment.first


def fill(state: Mapping[str, Any], files: Reader, shape: Shape, megatron: Megatron) -> int:
    """Fill this rank's parameters of a model from files.

    Args:
        state: sharded state dict of the model, which shares memory with the parameters.
        files: weights of the whole model.
        shape: layers of the model.
        megatron: Megatron package of the model.

    Returns:
        Number of bytes filled.
    """
    filled = 0
    for entry, pieces in pieces_of(state, megatron):
        if any(name not in files.names for piece in pieces for name in shape.names(piece.place)):
            continue  # indexers that a dense model's files lack; other missing names were refused earlier
        for piece in pieces:
            if not _within(piece.data, entry.data):
                raise RunError(
                    f"mindspeed_dsa: --load-hf: Megatron's {piece.key} is a copy of the model's parameter, "
                    "which cannot be filled through it; use `python -m mindspeed_dsa weights import`"
                )
            # To a device, copy the whole piece at once instead of part by part.
            if piece.data.device.type == "cpu":
                read_piece(piece, files, shape, piece.data)
            else:
                piece.data.copy_(read_piece(piece, files, shape))
            filled += piece.data.nbytes
    return filled


def _within(part: Tensor, whole: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return part.numel() == 0 or part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def in_threads(do: Callable[[Work], Result], works: Iterable[Work]) -> Iterator[Result]:
    """Yield ``do``'s results in the order of its arguments, computed by several threads.

    The first error is raised. Torch uses one thread per call meanwhile.

    Args:
        do: function that several threads call.
        works: arguments of the calls.
    """
    # The tensors are small: splitting every operation over cores takes longer than the operation.
    of_torch = torch.get_num_threads()
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(do, works)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(of_torch)  # also for threads that are created later
