"""One rank's rows of packed documents: what they see, and where in their documents they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.layout import Layout
from mindspeed_dsa.context_parallel.packs import layout_of
from mindspeed_dsa.context_parallel.roll import rolled
from mindspeed_dsa.megatron.packs import Pack


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
        """For each row the one behind it in its document, zeros behind the last; a collective.

        Args:
            tensor: this rank's rows along ``dim``; no gradient.
            dim: which one.
            group: context parallel ranks.
        """
        moved = tensor.roll(-1, dim) if self.layout is None else rolled(tensor, dim, group, self.layout)
        last = ~self._own(self.pack.followed).to(tensor.device)
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
        """Neighbours in one document, or in padding: first row, end, and the keys that the last row sees."""
        starts, ends = self.starts, self.ends
        sees = ends > 0
        leaps = (ends.diff() != 1) | (starts.diff() != 0)
        breaks = ((sees[1:] != sees[:-1]) | (sees[1:] & leaps)).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), len(ends)]
        return [(first, end, int(starts[first]), int(ends[end - 1])) for first, end in pairwise(bounds)]

    def angles(self, embedding: Any) -> tuple[Tensor, float]:
        """Rotary angles, from position 0 in each document, and YaRN's magnitude.

        Args:
            embedding: Megatron's rotary embedding, plain or YaRN.

        Returns:
            ``[rows, 1, 1, rope]``, and 1 for plain RoPE.
        """
        made = embedding(self.pack.length, packed_seq=True)
        angles, mscale = made if isinstance(made, tuple) else (made, 1.0)
        return angles.index_select(0, self._own(self.pack.positions).to(angles.device)), mscale

    def _own(self, of_pack: Tensor) -> Tensor:
        return of_pack if self._rows is None else of_pack.index_select(0, self._rows)

    @cached_property
    def _rows(self) -> Tensor | None:
        return None if self.layout is None else self.layout.rows_of_rank(self.rank, self.pack.length)
