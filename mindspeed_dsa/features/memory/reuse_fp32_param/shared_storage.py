"""Storage that holds either float32 master weights, or bfloat16 weights and their lower halves.

In *master form* the storage holds ``n`` float32 numbers. In *pair form* it holds ``n`` contiguous bfloat16
numbers, as matrix products need them, and separately the lower halves of the float32 numbers (see
``bf16_split.py``). Conversion runs in place, block by block, so it needs scratch memory for a few blocks
only. The block size does not affect the result.

Positions below count 16-bit halves: word ``i`` of the master form has its lower half at ``2i`` and its upper
half at ``2i + 1``.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mindspeed_dsa.features.memory.reuse_fp32_param.bf16_split import Halves, join, split

# 2**15 words x 4 bytes = 128 KiB: a block and its scratch fit a core's cache, and the heap allocates them.
# Above this size torch splits each operator over threads, whose synchronization takes as long as the work.
_BLOCK_CPU = 2**15
"""Words per block on CPU."""
_BLOCK_DEVICE = 2**22
"""Words per block on a device, enough work for each kernel."""


class SharedStorage(ABC):
    """Storage of ``numel`` numbers in master form or pair form; initially pair form with zero lower halves.

    Attributes:
        weights: bfloat16 ``[numel]``, valid in pair form.
        master: float32 ``[numel]``, valid in master form.
        in_master_form: whether the storage is in master form.
    """

    weights: Tensor
    master: Tensor

    def __init__(self, numel: int, block: int) -> None:
        if sys.byteorder != "little":
            raise RuntimeError("reuse-fp32-param: needs a little-endian machine; switch the feature off")
        self.numel, self.block = numel, block
        self.in_master_form = False
        self._listed: dict[int, tuple[Tensor, Tensor]] = {}  # block -> positions inside it, upper halves

    @abstractmethod
    def to_master(self) -> None:
        """Convert the pairs to float32 numbers."""

    @abstractmethod
    def to_pairs(self) -> None:
        """Round the float32 numbers to bfloat16 and store their lower halves."""

    @abstractmethod
    def _low(self, start: int, end: int) -> Tensor:
        """Return the int16 lower halves of numbers ``start`` to ``end``, which must be inside one block."""

    def read(self, start: int, end: int) -> Tensor:
        """Return a copy of the float32 numbers ``start`` to ``end`` in either form."""
        if self.in_master_form:
            return self.master[start:end].clone()
        values = torch.empty(end - start, dtype=torch.float32, device=self.weights.device)
        for number, first, last in self._blocks(start, end):
            values[first - start : last - start] = join(self._pair(number, first, last))
        return values

    def write(self, start: int, values: Tensor) -> None:
        """Store float32 numbers from position ``start`` on, in pair form; the weights are rounded."""
        self._expect_pairs("write")
        for number, first, last in self._blocks(start, start + values.numel()):
            parts = split(values[first - start : last - start].contiguous())
            self.weights[first:last] = parts.weight
            self._low(first, last).copy_(parts.low)
            self._forget(number, first, last)
            self._list(number, first, parts)

    def drop_lower_halves(self) -> None:
        """Set all lower halves to zero, so that the float32 numbers equal the bfloat16 weights."""
        self._expect_pairs("drop_lower_halves")
        for _, first, last in self._blocks(0, self.numel):
            self._low(first, last).zero_()
        self._listed.clear()

    def spoil(self) -> None:
        """Switch to pair form and set all weights to NaN; also works after an interrupted conversion."""
        self.weights.fill_(math.nan)
        self.in_master_form = False
        self.drop_lower_halves()

    def spoil_others(self) -> bool:
        """In pair form, set other ranks' weights that the master form has overwritten to NaN.

        Returns:
            Whether the master form overlaps other ranks' weights.
        """
        return False

    def _blocks(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Split the range at block boundaries; yield block number, start and end."""
        for number in range(start // self.block, -(-end // self.block)):
            yield number, max(start, number * self.block), min(end, (number + 1) * self.block)

    def _pair(self, number: int, first: int, last: int) -> Halves:
        where, high = self._listed.get(number, (None, None))
        weight, low = self.weights[first:last], self._low(first, last)
        if where is None or high is None:
            nothing = torch.empty(0, dtype=torch.int64, device=weight.device)
            return Halves(weight, low, nothing, nothing.to(torch.int16))
        # Listed positions count from the start of the block, so a whole block needs no shift.
        if (first, last) == (number * self.block, min((number + 1) * self.block, self.numel)):
            return Halves(weight, low, where, high)
        shifted = where - (first - number * self.block)
        inside = (shifted >= 0) & (shifted < last - first)
        # Part of a block: keep the listed numbers inside it.
        return Halves(weight, low, shifted[inside], high[inside])

    def _list(self, number: int, first: int, parts: Halves) -> None:
        if parts.where.numel() == 0:
            return
        where, high = parts.where + (first - number * self.block), parts.high
        if number in self._listed:
            before = self._listed[number]
            where, high = torch.cat((before[0], where)), torch.cat((before[1], high))
        self._listed[number] = where, high

    def _forget(self, number: int, first: int, last: int) -> None:
        if number in self._listed:
            where, high = self._listed.pop(number)
            place = where + number * self.block
            outside = (place < first) | (place >= last)
            if bool(outside.any()):
                self._listed[number] = where[outside], high[outside]

    def _expect_pairs(self, what: str) -> None:
        if self.in_master_form:
            raise RuntimeError(f"reuse-fp32-param: {what} in the middle of an optimizer step")


class InPlaceStorage(SharedStorage):
    """Storage of 4 bytes per number for a parameter, or for a parameter buffer without data parallelism.

    In pair form the storage starts with the lower halves of the ``k`` whole blocks, followed by the weights
    of these blocks. The weights of the last, incomplete block come next, and its lower halves come last. The
    weights are therefore contiguous, and a conversion moves whole blocks of halves.

    Args:
        numel: number of float32 numbers.
        device: device of the storage.
        block: numbers per block; the default depends on the device.
    """

    def __init__(self, numel: int, device: torch.device | str, block: int | None = None) -> None:
        super().__init__(numel, block or default_block(torch.device(device)))
        self._whole = numel // self.block
        self._halves = torch.zeros(2 * numel, dtype=torch.int16, device=device)
        self.master = self._halves.view(torch.float32)
        start = self._whole * self.block
        self.weights = self._halves[start : start + numel].view(torch.bfloat16)

    def to_pairs(self) -> None:
        """Convert in place; see :meth:`SharedStorage.to_pairs`."""
        for number, first, last in self._blocks(0, self.numel):
            parts = split(self.master[first:last])
            self._list(number, first, parts)
            weight = parts.weight.view(torch.int16)
            # The incomplete block has its weights first, next to the weights of the whole blocks.
            ordered = (parts.low, weight) if number < self._whole else (weight, parts.low)
            torch.cat(ordered, out=self._halves[2 * first : 2 * last])
        # Whole blocks now alternate low, weight, low, weight: place j takes 2j, and place k + j takes 2j + 1.
        self._permute(lambda place: 2 * place if place < self._whole else 2 * (place - self._whole) + 1)
        self.in_master_form = False

    def to_master(self) -> None:
        """Convert in place; see :meth:`SharedStorage.to_master`."""
        # Inverse of the permutation in `to_pairs`: all low halves first -> low, weight, low, weight.
        self._permute(lambda place: place // 2 + (self._whole if place % 2 else 0))
        for number, first, last in self._blocks(0, self.numel):
            left, right = self._halves[2 * first : 2 * last].view(2, -1)
            low, weight = (left, right) if number < self._whole else (right, left)
            pair = self._pair(number, first, last)
            self.master[first:last] = join(pair._replace(weight=weight.view(torch.bfloat16), low=low))
        self._listed.clear()
        self.in_master_form = True

    def _low(self, start: int, end: int) -> Tensor:
        shift = 0 if start < self._whole * self.block else self.numel
        return self._halves[start + shift : end + shift]

    def _permute(self, source: Callable[[int], int]) -> None:
        """Permute blocks in place: position ``i`` gets the block at ``source(i)``. Uses one spare block."""
        places = self._halves[: 2 * self._whole * self.block].view(-1, self.block) if self._whole else ()
        done: set[int] = set()
        # Follow each cycle of the permutation from its first place.
        for start in range(len(places)):
            if start in done or source(start) == start:
                continue
            spare, place = places[start].clone(), start
            while source(place) != start:
                places[place].copy_(places[source(place)])
                done.add(place)
                place = source(place)
            places[place].copy_(spare)
            done.add(place)


class OverBucketStorage(SharedStorage):
    """Storage for one data parallel rank's shard of a bucket of bfloat16 weights.

    The weights stay in the bucket, which Megatron all-gathers. In master form, the float32 numbers overwrite
    this rank's shard and a neighbouring shard, which stays invalid from the optimizer step until the next
    all-gather. The lower halves take additional memory: 2 bytes per number of the shard.

    Args:
        bucket: bfloat16 ``[size * n]``, contiguous.
        rank, size: index of this rank's shard, and number of shards (at least 2).
        block: numbers per block; the default depends on the device.

    Raises:
        ValueError: number and length of the shards are both odd, which Megatron's padding prevents.
    """

    def __init__(self, bucket: Tensor, rank: int, size: int, block: int | None = None) -> None:
        numel = bucket.numel() // size
        super().__init__(numel, block or default_block(bucket.device))
        # float32 numbers need an even position, and one of the two neighbours always provides it. With shards
        # of odd length, (rank - 1) * numel and rank * numel differ in parity.
        self._upper = rank > 0 and ((rank - 1) * numel) % 2 == 0
        start = (rank - 1 if self._upper else rank) * numel
        if start + 2 * numel > bucket.numel():
            raise ValueError(
                f"reuse-fp32-param: shard {rank} of {size} with {numel} numbers each has no even position to "
                "begin its float32 weights at; Megatron pads buckets to a multiple of 128"
            )
        self.weights = bucket[rank * numel : (rank + 1) * numel]
        self._others = bucket[start : start + numel] if self._upper else bucket[start + numel :][:numel]
        self.master = bucket[start : start + 2 * numel].view(torch.float32)
        self._lower_halves = torch.zeros(numel, dtype=torch.int16, device=bucket.device)

    def to_pairs(self) -> None:
        """Convert in place; see :meth:`SharedStorage.to_pairs`."""
        # This order writes weights only over words that were read already.
        for number, first, last in self._ordered(descending=self._upper):
            parts = split(self.master[first:last])
            self._list(number, first, parts)
            self.weights[first:last] = parts.weight
            self._lower_halves[first:last] = parts.low
        self.in_master_form = False

    def to_master(self) -> None:
        """Convert in place; see :meth:`SharedStorage.to_master`."""
        for number, first, last in self._ordered(descending=not self._upper):
            self.master[first:last] = join(self._pair(number, first, last))
        self._listed.clear()
        self.in_master_form = True

    def spoil_others(self) -> bool:
        """Overwrite the neighbour's weights with NaN; see :meth:`SharedStorage.spoil_others`."""
        self._others.fill_(math.nan)
        return True

    def _low(self, start: int, end: int) -> Tensor:
        return self._lower_halves[start:end]

    def _ordered(self, descending: bool) -> list[tuple[int, int, int]]:
        blocks = list(self._blocks(0, self.numel))
        return blocks[::-1] if descending else blocks


def default_block(device: torch.device) -> int:
    """Return the default number of words per block on the device."""
    return _BLOCK_CPU if device.type == "cpu" else _BLOCK_DEVICE
