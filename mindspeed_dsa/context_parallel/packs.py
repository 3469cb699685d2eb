"""Packed documents: their boundaries, their layouts over context parallel ranks, and one rank's tokens."""

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

# -- places of documents -----------------------------------------------------------------------


@dataclass(frozen=True)
class Pack:
    """Boundaries of the documents in a packed sequence. Tokens outside documents are padding.

    Attributes:
        documents: ``(begin, end)`` positions of each document, in order; none is empty.
        length: number of tokens, including padding.
    """

    documents: tuple[tuple[int, int], ...]
    length: int

    @classmethod
    def of(cls, params: Any, length: int) -> Pack:
        """Build from Megatron's ``PackedSeqParams``. Synchronizes with the device once per device tensor.

        Accepts prefix sums of any shape, empty documents, tokens after the last document, and padding between
        documents (``cu_seqlens_q_padded``). Fields unrelated to lengths are not read.

        Args:
            params: ``PackedSeqParams`` of any release.
            length: number of tokens of the whole pack, over all context parallel ranks.

        Raises:
            ValueError: the documents do not fit in ``length`` tokens.
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
        """Build from prefix sums of the documents' lengths.

        Args:
            ends: prefix sums of the lengths, the first 0.
            begins: prefix sums of the lengths including padding after each document. ``None``: no padding
                between documents.
            length: number of tokens.

        Raises:
            ValueError: the documents do not fit in ``length`` tokens, or the sums are not ascending from 0.
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
        places = zip(begins, sizes, strict=False)  # begins has one entry more, the end of the last document
        return cls(tuple((begin, begin + size) for begin, size in places if size), length)

    @classmethod
    def of_tokens(cls, tokens: Tensor, end: int) -> Pack:
        """Build from token ids: a document ends after each end token, and at the end of the sequence.

        Args:
            tokens: token ids, ``[length]`` or ``[1, length]``.
            end: token id that ends a document.
        """
        after = (tokens.flatten() == end).nonzero().flatten() + 1
        length = tokens.numel()
        return cls.of_prefix_sums([0, *after.tolist(), length], None, length)

    def params(self, megatron: Megatron, device: torch.device, block_rows: int = 0, padding: int = 0) -> Any:
        """Build ``PackedSeqParams`` for Megatron's own code, in which padding is part of a document.

        Args:
            megatron: accessor of Megatron's modules.
            device: device of the tensors.
            block_rows: block size of :class:`BalancedBlocks`, for the field ``dealt_block_rows``.
            padding: number of padding tokens on the last rank, for the field ``dealt_padding``.
        """
        places = list(self.documents)
        # Padding before the first document becomes the padding of an empty document.
        if not places or places[0][0] > 0:
            places.insert(0, (0, 0))
        bounds = [*(begin for begin, _ in places), self.length]
        sums = {"cu_seqlens": torch.tensor([0, *(end - begin for begin, end in places)]).cumsum(0)}
        longest = self.longest
        if self.tokens < self.length:
            sums["cu_seqlens_padded"] = torch.tensor(bounds)
            # Megatron's rotary embedding makes this many angles.
            longest = max(after - before for before, after in pairwise(bounds))
        fields = {}
        for name, tensor in sums.items():
            listed, on_device = tensor.tolist(), upload(tensor.to(torch.int32), device)
            # The lengths are known here, so reading them back need not wait for the device.
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
        """Number of tokens that belong to a document."""
        return sum(end - begin for begin, end in self.documents)

    @cached_property
    def starts(self) -> Tensor:
        """First position of each token's document; 0 for padding. int32 ``[length]`` on the host."""
        return self._by_row[0]

    @cached_property
    def ends(self) -> Tensor:
        """End of each token's visible keys (position + 1); 0 for padding. int32 ``[length]``, host."""
        return self._by_row[1]

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document; 0 for padding. int64 ``[length]`` on the host."""
        return (self.ends - self.starts - 1).clamp_min(0).long()

    @property
    def counted(self) -> Tensor | None:
        """Mask of tokens that are not padding, bool ``[length]`` on the host; ``None`` without padding."""
        return None if self.tokens == self.length else self.ends > 0

    @property
    def followed(self) -> Tensor:
        """Mask of tokens followed by a token of the same document, bool ``[length]`` on the host."""
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
        # Rows of all documents: documents (2, 4) and (5, 8) give 2 3 5 6 7.
        rows = torch.arange(self.tokens) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes) + begins
        starts[rows], ends[rows] = begins.int(), (rows + 1).int()
        return starts, ends


# -- Megatron's description, PackedSeqParams ---------------------------------------------------


@cache
def _with_block_rows(params: type) -> Any:
    """Return a subclass of ``PackedSeqParams`` with extra fields that describe :class:`BalancedBlocks`."""
    dealt = [("dealt_block_rows", int, 0), ("dealt_padding", int, 0)]
    return make_dataclass(params.__name__, dealt, bases=(params,))


def places_of(params: Any) -> tuple[tuple[int, int], ...]:
    """Return ``(begin, end)`` of each document in a ``PackedSeqParams``, including padding after it."""
    sums = _prefix_sums(params, "cu_seqlens_q_padded") or _prefix_sums(params, "cu_seqlens_q") or [0]
    return tuple(pairwise(sums))


_read: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Lengths read from a device tensor, with the tensor's version; all layers share a microbatch's tensors."""


def _prefix_sums(params: Any, name: str) -> list[int] | None:
    sums = getattr(params, name, None)
    if not isinstance(sums, Tensor) or not _host_waits_for(sums):
        return None if sums is None else _listed(sums)
    cached: tuple[int, list[int]] | None = _read.get(sums)
    if cached is None or cached[0] != sums._version:
        cached = _read[sums] = sums._version, _listed(sums)
    return cached[1]


def _host_waits_for(sums: Tensor) -> bool:
    """Return whether reading ``sums`` synchronizes with the device; the caller then caches the result."""
    return sums.device.type != "cpu" and not sums.is_inference()


def _listed(sums: Any) -> list[int]:
    return [int(end) for end in torch.as_tensor(sums).flatten().tolist()]


# -- layouts of packs --------------------------------------------------------------------------


@dataclass(frozen=True)
class BalancedBlocks:
    """Layout that balances attention cost: blocks sorted by cost, dealt back and forth over the ranks.

    The cost of a query is proportional to its position in its document. A zigzag over the pack does not
    balance this, because documents differ in length. A zigzag per document would need padding, because short
    documents cannot be cut into equal chunks. Attention must have the keys of all tokens on every rank.

    Attributes:
        ranks: context parallel size.
        pack: boundaries of the documents.
        block_rows: largest number of tokens per block; smaller if needed to divide the pack evenly.
        padding: number of padding tokens at the end of the pack. The last rank always gets them, so that
            every layer can compute their place.
    """

    ranks: int
    pack: Pack
    block_rows: int = 128
    padding: int = 0

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Return the positions of a rank's tokens; see :class:`.layout.Layout`. Padding has cost 0."""
        if length != self.pack.length or length % self.ranks:
            raise ValueError(
                f"packed sequences: {length} rows of a pack of {self.pack.length} cannot be dealt evenly to "
                f"{self.ranks} context parallel ranks; use a multiple of {self.ranks}"
            )
        return _assigned(self)[rank]


@lru_cache(maxsize=64)
def _assigned(layout: BalancedBlocks) -> Tensor:
    """Return the positions of all ranks' tokens, int64 ``[ranks, length / ranks]``; cached."""
    ranks, pack = layout.ranks, layout.pack
    # 1536 rows per rank and blocks of 128: 128. 1000 rows per rank: gcd(1000, 128) = 8.
    block = math.gcd(pack.length // ranks, layout.block_rows)
    # Keys that each row sees, summed per block.
    work = (pack.ends - pack.starts).view(-1, block).sum(1)
    # [turns, ranks]. 2 ranks, blocks by weight a > b > c > d: turns [a, b], [d, c].
    heaviest = work.argsort(descending=True, stable=True).view(-1, ranks)
    heaviest[1::2] = heaviest[1::2].flip(1)
    _give_to_last_rank(heaviest, len(work) - -(-layout.padding // block))
    blocks = heaviest.t().sort(dim=1).values  # [ranks, blocks of a rank]
    return (blocks[..., None] * block + torch.arange(block)).flatten(1)


def _give_to_last_rank(dealt: Tensor, first: int) -> None:
    """Swap blocks in ``[turns, ranks]`` in place, so that the last rank has all from ``first`` on."""
    for turn, rank in (dealt[:, :-1] >= first).nonzero().tolist():
        free = (dealt[:, -1] < first).nonzero().flatten().tolist()
        other = turn if turn in free else free[-1]
        dealt[turn, rank], dealt[other, -1] = dealt[other, -1].clone(), dealt[turn, rank].clone()


@dataclass(frozen=True)
class DocumentZigzag:
    """Zigzag per document, as in Transformer Engine: rank ``r`` gets chunks ``r`` and ``2c - 1 - r``.

    Each document is split into ``2c`` equal chunks.

    Attributes:
        ranks: context parallel size ``c``.
        places: ``(begin, end)`` of each document, including padding after it.
    """

    ranks: int
    places: tuple[tuple[int, int], ...]

    def rows_of_rank(self, rank: int, length: int) -> Tensor:
        """Return the positions of a rank's tokens; see :class:`.layout.Layout`."""
        parts = []
        for begin, end in self.places:
            chunk, rest = divmod(end - begin, 2 * self.ranks)
            if rest or end > length:
                raise ValueError(
                    f"packed sequences: a document that takes {end - begin} rows of {length} has no two "
                    f"equal chunks for each of {self.ranks} context parallel ranks; pad documents to "
                    f"multiples of {2 * self.ranks}, or let --pack-documents deal out the rows"
                )
            # 4 ranks, 16 rows from 0: rank 1 gets rows 2 3 (chunk 1) and 12 13 (chunk 6).
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
    """Return a pack's layout: :class:`BalancedBlocks` if ``params`` asks for it, else Transformer Engine's.

    Args:
        params: ``PackedSeqParams`` of the pack.
        pack: the same pack.
        ranks: context parallel size.
    """
    block_rows = getattr(params, "dealt_block_rows", 0)
    if not block_rows:
        return DocumentZigzag(ranks, places_of(params))
    return BalancedBlocks(ranks, pack, block_rows, getattr(params, "dealt_padding", 0))


# -- rows of one rank --------------------------------------------------------------------------


@dataclass(frozen=True)
class PackRows:
    """Tokens of a pack on one rank.

    Attributes:
        pack: the whole pack.
        layout: layout of the pack, or ``None`` if this rank holds all tokens.
        rank: index in the context parallel group.
    """

    pack: Pack
    layout: Layout | None = None
    rank: int = 0

    @classmethod
    def of(cls, params: Any, rows: int, group: ProcessGroup) -> PackRows:
        """Build from ``PackedSeqParams``.

        Args:
            params: ``PackedSeqParams`` of the whole pack.
            rows: number of tokens on this rank.
            group: context parallel group.

        Raises:
            ValueError: the documents do not fit in the pack's number of tokens.
        """
        ranks = group.size()
        pack = Pack.of(params, rows * ranks)
        return cls(pack) if ranks == 1 else cls(pack, layout_of(params, pack, ranks), group.rank())

    @property
    def starts(self) -> Tensor:
        """Values of :attr:`Pack.starts` for this rank's tokens; likewise ``ends`` and ``counted``."""
        return self._own(self.pack.starts)

    @property
    def ends(self) -> Tensor:
        return self._own(self.pack.ends)

    @property
    def counted(self) -> Tensor | None:
        counted = self.pack.counted
        return None if counted is None else self._own(counted)

    def next_rows(self, tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        """Return the next token of the same document for each token, zeros after the last. Collective.

        Args:
            tensor: this rank's tokens along ``dim``; gradients are not supported.
            dim: dimension of the tokens.
            group: context parallel group.
        """
        # Successors in the pack; those in another document are zeroed below.
        moved = tensor.roll(-1, dim) if self.layout is None else rolled(tensor, dim, group, self.layout)
        last = upload(~self._own(self.pack.followed), tensor.device)
        return moved.movedim(dim, -1).masked_fill_(last, 0).movedim(-1, dim)

    @property
    def end(self) -> int | None:
        """First position of padding at the pack's end; ``None`` without it, or under context parallelism."""
        last = self.pack.documents[-1][1] if self.pack.documents else 0
        return last if self.layout is None and 0 < last < self.pack.length else None

    @property
    def sequences(self) -> tuple[int, ...] | None:
        """Lengths of the documents; ``None`` for a part of a pack, or if padding separates documents."""
        if self.layout is not None:
            return None
        lengths = tuple(end - begin for begin, end in self.pack.documents)
        return lengths if lengths and sum(lengths) == (self.end or self.pack.length) else None

    def runs(self) -> list[tuple[int, int, int, int]]:
        """Return the runs of consecutive tokens that belong to one document, or that are padding.

        Returns:
            ``(first, end, first key, end of keys)`` of each run: its tokens, and the keys that its last token
            sees.
        """
        starts, ends = self.starts, self.ends
        sees = ends > 0
        leaps = (ends.diff() != 1) | (starts.diff() != 0)
        # A run ends at a change between data and padding, or where data leaps to another document or place.
        breaks = ((sees[1:] != sees[:-1]) | (sees[1:] & leaps)).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), len(ends)]
        return [(first, end, int(starts[first]), int(ends[end - 1])) for first, end in pairwise(bounds)]

    def angles(self, embedding: Any) -> tuple[Tensor, float]:
        """Return rotary angles with positions that restart in each document, and YaRN's magnitude.

        Args:
            embedding: Megatron's rotary embedding, plain or YaRN.

        Returns:
            Angles ``[rows, 1, 1, rope]``, and the magnitude, 1 for plain RoPE.
        """
        made = embedding(self.pack.length, packed_seq=True)
        # Plain RoPE returns only the angles, YaRN also its magnitude.
        angles, mscale = made if isinstance(made, tuple) else (made, 1.0)
        return angles.index_select(0, upload(self._own(self.pack.positions), angles.device)), mscale

    def _own(self, of_pack: Tensor) -> Tensor:
        return of_pack if self._rows is None else of_pack.index_select(0, self._rows)

    @cached_property
    def _rows(self) -> Tensor | None:
        return None if self.layout is None else self.layout.rows_of_rank(self.rank, self.pack.length)
