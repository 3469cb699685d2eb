"""Packed documents: where they lie, which rows each context parallel rank holds, and one rank's rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, make_dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_dsa.context_parallel.layout import Layout, rolled
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.platforms.host_pool import upload

# -- where documents lie -----------------------------------------------------------------------


@dataclass(frozen=True)
class Pack:
    """Places of documents in a row of tokens; rows of no document are padding.

    Attributes:
        documents: first row of each document, and one past its last, in order; none is empty.
        length: number of rows, padding included.
    """

    documents: tuple[tuple[int, int], ...]
    length: int

    @classmethod
    def of(cls, params: Any, length: int) -> Pack:
        """Read Megatron's description; waits for the device if its tensors are on one, once for each tensor.

        Takes prefix sums of any shape, documents without tokens, rows behind the last document, and padding
        between documents (``cu_seqlens_q_padded``). Fields that are not about lengths are not read.

        Args:
            params: a ``PackedSeqParams`` of any release.
            length: rows of the whole pack, over all context parallel ranks.

        Raises:
            ValueError: it describes no documents of this many rows.
        """
        kind = getattr(params, "qkv_format", None)
        if kind != "thd" or getattr(params, "local_cp_size", None) is not None:
            raise ValueError(
                f"packed sequences: qkv_format is {kind!r} and local_cp_size "
                f"{getattr(params, 'local_cp_size', None)}; packs are one row of tokens, qkv_format='thd', "
                "without hybrid context parallelism"
            )
        ends = _prefix_sums(params, "cu_seqlens_q")
        if ends is None:
            raise ValueError("packed sequences: no cu_seqlens_q says where documents end; set it")
        keys = _prefix_sums(params, "cu_seqlens_kv")
        if keys is not None and keys != ends:
            raise ValueError(
                "packed sequences: cu_seqlens_q and cu_seqlens_kv differ; in self-attention queries and keys "
                "are those of the same documents"
            )
        return cls.of_prefix_sums(ends, _prefix_sums(params, "cu_seqlens_q_padded"), length)

    @classmethod
    def of_prefix_sums(cls, ends: list[int], begins: list[int] | None, length: int) -> Pack:
        """Build from prefix sums of their lengths.

        Args:
            ends: begins with 0.
            begins: the same with padding after each document included; None: there is none between them.
            length: number of rows.

        Raises:
            ValueError: there are not so many rows.
        """
        begins = begins or ends
        sizes, rooms = ([after - before for before, after in pairwise(sums)] for sums in (ends, begins))
        fits = len(rooms) == len(sizes) and all(
            0 <= size <= room for size, room in zip(sizes, rooms, strict=True)
        )
        if not ends or ends[0] or begins[0] or not fits or begins[-1] > length:
            raise ValueError(
                f"packed sequences: {length} rows cannot hold documents that end at {ends}"
                + (f", in places that end at {begins}" if begins is not ends else "")
                + "; prefix sums begin with 0, never fall, and end with at most the number of rows"
            )
        places = zip(begins, sizes, strict=False)  # begins ends with the end of the last
        return cls(tuple((begin, begin + size) for begin, size in places if size), length)

    @classmethod
    def of_tokens(cls, tokens: Tensor, end: int) -> Pack:
        """Build from tokens: documents end with a token of their own, the last one also with the row.

        Args:
            tokens: ``[length]`` or ``[1, length]``.
            end: the token.
        """
        after = (tokens.flatten() == end).nonzero().flatten() + 1
        length = tokens.numel()
        return cls.of_prefix_sums([0, *after.tolist(), length], None, length)

    def params(self, megatron: Megatron, device: torch.device, block_rows: int = 0, padding: int = 0) -> Any:
        """Make Megatron's description, which its own code understands too: padding belongs to a place.

        Args:
            megatron: whose ``PackedSeqParams`` it is.
            device: of its tensors.
            block_rows: of the blocks in which context parallel ranks were dealt the rows; says
                ``dealt_block_rows`` of the result.
            padding: rows at the end, which the last rank was dealt; says ``dealt_padding`` of the result.
        """
        places = list(self.documents)
        if not places or places[0][0] > 0:
            places.insert(0, (0, 0))
        bounds = [*(begin for begin, _ in places), self.length]
        sums = {"cu_seqlens": torch.tensor([0, *(end - begin for begin, end in places)]).cumsum(0)}
        longest = self.longest
        if self.tokens < self.length:
            sums["cu_seqlens_padded"] = torch.tensor(bounds)
            # Megatron's own rotary embedding makes as many angles.
            longest = max(after - before for before, after in pairwise(bounds))
        fields = {}
        for name, tensor in sums.items():
            listed, on_device = tensor.tolist(), upload(tensor.to(torch.int32), device)
            if _host_waits_for(on_device):
                _read[on_device] = on_device._version, listed
            fields.update({name.replace("seqlens", f"seqlens_{kind}"): on_device for kind in ("q", "kv")})
        make = _with_block_rows(megatron("core.packed_seq_params").PackedSeqParams)
        return make(
            qkv_format="thd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            dealt_block_rows=block_rows,
            dealt_padding=padding,
            **fields,
        )

    @property
    def longest(self) -> int:
        """Length of the longest document."""
        return max((end - begin for begin, end in self.documents), default=0)

    @property
    def tokens(self) -> int:
        """Rows that belong to a document."""
        return sum(end - begin for begin, end in self.documents)

    @cached_property
    def starts(self) -> Tensor:
        """``[length]`` int32 on the host: first row of each row's document; 0 for padding."""
        return self._by_row[0]

    @cached_property
    def ends(self) -> Tensor:
        """``[length]`` int32 on the host: one past each row, where its view ends; 0 for padding."""
        return self._by_row[1]

    @property
    def positions(self) -> Tensor:
        """``[length]`` int64 on the host: of each row in its document; 0 for padding."""
        return (self.ends - self.starts - 1).clamp_min(0).long()

    @property
    def counted(self) -> Tensor | None:
        """``[length]`` bool on the host, False for padding; None without any."""
        return None if self.tokens == self.length else self.ends > 0

    @property
    def followed(self) -> Tensor:
        """``[length]`` bool on the host: rows behind which another one of their document comes."""
        sees = self.ends > 0
        followed = torch.zeros_like(sees)
        followed[:-1] = sees[:-1] & sees[1:] & (self.starts[:-1] == self.starts[1:])
        return followed

    @cached_property
    def _by_row(self) -> tuple[Tensor, Tensor]:
        starts, ends = torch.zeros(2, self.length, dtype=torch.int32)
        bounds = torch.tensor(self.documents, dtype=torch.int64).view(-1, 2)
        sizes = bounds[:, 1] - bounds[:, 0]
        begins = bounds[:, 0].repeat_interleave(sizes)
        rows = torch.arange(self.tokens) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes) + begins
        starts[rows], ends[rows] = begins.int(), (rows + 1).int()
        return starts, ends


# -- Megatron's description, PackedSeqParams ---------------------------------------------------


@cache
def _with_block_rows(params: type) -> Any:
    """Make a ``PackedSeqParams`` that also says how context parallel ranks were dealt the rows."""
    dealt = [("dealt_block_rows", int, 0), ("dealt_padding", int, 0)]
    return make_dataclass(params.__name__, dealt, bases=(params,))


def places_of(params: Any) -> tuple[tuple[int, int], ...]:
    """Return the rows that each document of Megatron's description takes, padding behind it included."""
    sums = _prefix_sums(params, "cu_seqlens_q_padded") or _prefix_sums(params, "cu_seqlens_q") or [0]
    return tuple(pairwise(sums))


_read: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Lengths that device tensors held, with the number of changes seen by then; layers share a microbatch's."""


def _prefix_sums(params: Any, name: str) -> list[int] | None:
    sums = getattr(params, name, None)
    if not isinstance(sums, Tensor) or not _host_waits_for(sums):
        return None if sums is None else _listed(sums)
    known: tuple[int, list[int]] | None = _read.get(sums)
    if known is None or known[0] != sums._version:
        known = _read[sums] = sums._version, _listed(sums)
    return known[1]


def _host_waits_for(sums: Tensor) -> bool:
    """Return whether reading is slow; tensors of inference mode do not tell when they have changed."""
    return sums.device.type != "cpu" and not sums.is_inference()


def _listed(sums: Any) -> list[int]:
    return [int(end) for end in torch.as_tensor(sums).flatten().tolist()]


# -- layouts: rows of each context parallel rank -----------------------------------------------


@dataclass(frozen=True)
class BalancedBlocks:
    """Blocks of rows dealt by the work in them: the heaviest to the first rank, and back from the last one.

    A row costs as much as its position in its document. Chunks of the pack, or of its documents, do not
    balance that: documents are long and short, and short ones cannot be cut into equal parts without padding.
    Where every rank has the keys of all rows, any rows may be its own.

    Attributes:
        ranks: context parallel size.
        pack: where documents lie.
        block_rows: rows of a block; fewer, where these do not deal the pack out evenly.
        padding: rows at the end that the last rank gets in any case, so that every layer knows them.
    """

    ranks: int
    pack: Pack
    block_rows: int = 128
    padding: int = 0

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Do as :class:`.layout.Layout` says; padding costs nothing."""
        if length != self.pack.length or length % self.ranks:
            raise ValueError(
                f"packed sequences: {length} rows of a pack of {self.pack.length} cannot be dealt evenly to "
                f"{self.ranks} context parallel ranks; use a multiple of {self.ranks}"
            )
        return _assigned(self)[rank]


@lru_cache(maxsize=64)
def _assigned(layout: BalancedBlocks) -> Tensor:
    """Return ``[ranks, length / ranks]`` int64; microbatches on their way have one each."""
    ranks, pack = layout.ranks, layout.pack
    block = math.gcd(pack.length // ranks, layout.block_rows)
    work = (pack.ends - pack.starts).view(-1, block).sum(1)
    heaviest = work.argsort(descending=True, stable=True).view(-1, ranks)
    heaviest[1::2] = heaviest[1::2].flip(1)
    _give_to_last_rank(heaviest, len(work) - -(-layout.padding // block))
    blocks = heaviest.t().sort(dim=1).values  # [ranks, blocks of a rank]
    return (blocks[..., None] * block + torch.arange(block)).flatten(1)


def _give_to_last_rank(dealt: Tensor, first: int) -> None:
    """Exchange blocks, from ``first`` on, for others of the last rank, if possible of the same turn.

    Args:
        dealt: ``[turns, ranks]``, blocks by weight; changed in place.
        first: the number of the first one.
    """
    for turn, rank in (dealt[:, :-1] >= first).nonzero().tolist():
        free = (dealt[:, -1] < first).nonzero().flatten().tolist()
        other = turn if turn in free else free[-1]
        dealt[turn, rank], dealt[other, -1] = dealt[other, -1].clone(), dealt[turn, rank].clone()


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
        """Do as :class:`.layout.Layout` says."""
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
    """Return which rows of a pack context parallel ranks hold: dealt out here, or cut by Transformer Engine.

    Args:
        params: Megatron's description of the pack.
        pack: the same.
        ranks: context parallel size.
    """
    block_rows = getattr(params, "dealt_block_rows", 0)
    if not block_rows:
        return DocumentZigzag(ranks, places_of(params))
    return BalancedBlocks(ranks, pack, block_rows, getattr(params, "dealt_padding", 0))


# -- rows of one rank --------------------------------------------------------------------------


@dataclass(frozen=True)
class PackRows:
    """Rows of a pack.

    Attributes:
        pack: the whole.
        layout: which rows context parallel ranks hold; None: this one holds all.
        rank: in the context parallel group.
    """

    pack: Pack
    layout: Layout | None = None
    rank: int = 0

    @classmethod
    def of(cls, params: Any, rows: int, group: ProcessGroup) -> PackRows:
        """Read Megatron's description.

        Args:
            params: a ``PackedSeqParams`` of the whole pack.
            rows: on this rank.
            group: context parallel ranks.

        Raises:
            ValueError: it describes no documents of so many rows.
        """
        ranks = group.size()
        pack = Pack.of(params, rows * ranks)
        return cls(pack) if ranks == 1 else cls(pack, layout_of(params, pack, ranks), group.rank())

    @property
    def starts(self) -> Tensor:
        """As of :class:`Pack`, and so are the next four."""
        return self._own(self.pack.starts)

    @property
    def ends(self) -> Tensor:
        return self._own(self.pack.ends)

    @property
    def counted(self) -> Tensor | None:
        counted = self.pack.counted
        return None if counted is None else self._own(counted)

    def next_rows(self, tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        """Return, for each row, the one behind it in its document, zeros behind the last; a collective.

        Args:
            tensor: this rank's rows along ``dim``; no gradient.
            dim: which one.
            group: context parallel ranks.
        """
        moved = tensor.roll(-1, dim) if self.layout is None else rolled(tensor, dim, group, self.layout)
        last = upload(~self._own(self.pack.followed), tensor.device)
        return moved.movedim(dim, -1).masked_fill_(last, 0).movedim(-1, dim)

    @property
    def end(self) -> int | None:
        """The first row of the padding at the end, if this rank has all rows and there is such."""
        last = self.pack.documents[-1][1] if self.pack.documents else 0
        return last if self.layout is None and 0 < last < self.pack.length else None

    @property
    def sequences(self) -> tuple[int, ...] | None:
        """Lengths of the documents, if this rank has all rows, and none before :attr:`end` is padding."""
        if self.layout is not None:
            return None
        lengths = tuple(end - begin for begin, end in self.pack.documents)
        return lengths if lengths and sum(lengths) == (self.end or self.pack.length) else None

    def runs(self) -> list[tuple[int, int, int, int]]:
        """List runs of one document, or of padding: first row, end, and the keys that the last row sees."""
        starts, ends = self.starts, self.ends
        sees = ends > 0
        leaps = (ends.diff() != 1) | (starts.diff() != 0)
        breaks = ((sees[1:] != sees[:-1]) | (sees[1:] & leaps)).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), len(ends)]
        return [(first, end, int(starts[first]), int(ends[end - 1])) for first, end in pairwise(bounds)]

    def angles(self, embedding: Any) -> tuple[Tensor, float]:
        """Return rotary angles, from position 0 in each document, and YaRN's magnitude.

        Args:
            embedding: Megatron's rotary embedding, plain or YaRN.

        Returns:
            ``[rows, 1, 1, rope]``, and 1 for plain RoPE.
        """
        made = embedding(self.pack.length, packed_seq=True)
        angles, mscale = made if isinstance(made, tuple) else (made, 1.0)
        return angles.index_select(0, upload(self._own(self.pack.positions), angles.device)), mscale

    def _own(self, of_pack: Tensor) -> Tensor:
        return of_pack if self._rows is None else of_pack.index_select(0, self._rows)

    @cached_property
    def _rows(self) -> Tensor | None:
        return None if self.layout is None else self.layout.rows_of_rank(self.rank, self.pack.length)
