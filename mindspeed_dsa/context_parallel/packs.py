"""Which rows of packed documents each context parallel rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.layout import Layout
from mindspeed_dsa.megatron.packs import Pack, places_of


@dataclass(frozen=True)
class DealtBlocks:
    """Blocks of rows dealt by the work in them: the heaviest to the first rank, and back from the last one.

    A row costs as much as its position in its document. Chunks of the pack, or of its documents, do not
    balance that: documents are long and short, and short ones cannot be cut into equal parts without padding.
    Where every rank has the keys of all rows, any rows may be its own.

    Attributes:
        ranks: context parallel size.
        pack: where documents lie.
        block_rows: rows of a block; fewer, where these do not deal the pack out evenly.
    """

    ranks: int
    pack: Pack
    block_rows: int = 128

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """See :class:`mindspeed_dsa.context_parallel.layout.Layout`; padding costs nothing."""
        if length != self.pack.length or length % self.ranks:
            raise ValueError(
                f"packed sequences: {length} rows of a pack of {self.pack.length} cannot be dealt evenly to "
                f"{self.ranks} context parallel ranks; use a multiple of {self.ranks}"
            )
        return _dealt(self)[rank]


@lru_cache(maxsize=64)
def _dealt(layout: DealtBlocks) -> Tensor:
    """``[ranks, length / ranks]`` int64; microbatches on their way have one each."""
    ranks, pack = layout.ranks, layout.pack
    block = math.gcd(pack.length // ranks, layout.block_rows)
    work = (pack.ends - pack.starts).view(-1, block).sum(1)
    heaviest = work.argsort(descending=True, stable=True).view(-1, ranks)
    heaviest[1::2] = heaviest[1::2].flip(1)
    blocks = heaviest.t().sort(dim=1).values  # [ranks, blocks of a rank]
    return (blocks[..., None] * block + torch.arange(block)).flatten(1)


@dataclass(frozen=True)
class DocumentZigzag:
    """Each document in two chunks for each rank, ``r`` and ``2c - 1 - r`` of ``2c``, as Transformer Engine
    cuts packs.

    Attributes:
        ranks: context parallel size ``c``.
        places: rows that each document takes, padding included.
    """

    ranks: int
    places: tuple[tuple[int, int], ...]

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """See :class:`mindspeed_dsa.context_parallel.layout.Layout`."""
        parts = []
        for begin, end in self.places:
            chunk, rest = divmod(end - begin, 2 * self.ranks)
            if rest or end > length:
                raise ValueError(
                    f"packed sequences: a document that takes {end - begin} rows of {length} has no two "
                    f"equal chunks for each of {self.ranks} context parallel ranks; pad documents to "
                    f"multiples of {2 * self.ranks}, or let --pack-documents deal out the rows"
                )
            front, back = begin + rank * chunk, end - (rank + 1) * chunk
            parts += [torch.arange(front, front + chunk), torch.arange(back, back + chunk)]
        rows = torch.cat(parts)
        if len(rows) != length // self.ranks:
            raise ValueError(
                f"packed sequences: documents take {len(rows) * self.ranks} of {length} rows, so that it is "
                "not known which context parallel rank holds the rest; let --pack-documents deal them out"
            )
        return rows


def layout_of(params: Any, pack: Pack, ranks: int) -> Layout:
    """Which rows of a pack context parallel ranks hold: dealt out here, or cut by Transformer Engine.

    Args:
        params: Megatron's description of the pack.
        pack: the same.
        ranks: context parallel size.
    """
    block_rows = getattr(params, "dealt_block_rows", 0)
    return DealtBlocks(ranks, pack, block_rows) if block_rows else DocumentZigzag(ranks, places_of(params))
