"""Keys of the whole sequence on every rank; queries stay where they are."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.gather import GatheredRows, Members
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy, Exchanged


class KeyGather(ContextParallelStrategy):
    """Gathers keys and values, in any layout of rows; ``kvallgather_cp_algo``."""

    def members(self, length: int, group: ProcessGroup | None = None) -> Members:
        """Who has which rows of a sequence.

        Args:
            length: rows of the whole sequence.
            group: default: the context parallel ranks; or these times tensor parallel ranks, which have
                equal parts of their rows under sequence parallelism.
        """
        return Members.of(self.group if group is None else group, self.layout, length)

    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> Exchanged:
        """See :meth:`ContextParallelStrategy.exchange`; key and value may be any number of dimensions."""
        members = self.members(key.size(0) * self.ranks)
        keys, values = GatheredRows(key, members), GatheredRows(value, members)
        return Exchanged(
            query, keys.wait(), values.wait(), self.positions(query.size(0), device=query.device)
        )
