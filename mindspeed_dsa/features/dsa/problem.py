"""Inputs of sparse attention for one layer: operands, visible keys, process groups and loss options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.layout import counted_rows
from mindspeed_dsa.context_parallel.packs import PackRows
from mindspeed_dsa.context_parallel.padding import Padding
from mindspeed_dsa.features.dsa.operands import Operands, Run, split_by_runs
from mindspeed_dsa.megatron.selection_source import Chosen
from mindspeed_dsa.megatron.served_index import Serving
from mindspeed_dsa.ops.row_ranges import TO_LAST_KEY, RowForm
from mindspeed_dsa.platforms.host_pool import upload


@dataclass(frozen=True)
class IndexInputs:
    """Query, key and weights of the indexer, in the operators' layout."""

    query: Tensor
    """``[batch, sequence, index_heads, index_dim]``."""
    key: Tensor
    """``[batch, sequence, index_dim]``."""
    weights: Tensor
    """``[batch, sequence, index_heads]``, with all scales multiplied in."""
    use_relu: bool = True
    """Whether ReLU is applied to the per-head products."""
    key_receiver: Tensor | None = None
    """Receiver of the key's gradient in fp32; see :class:`Operands`."""

    def first(self, rows: int) -> IndexInputs:
        """Return the inputs of the first ``rows`` query tokens and keys."""
        return self.of(slice(rows), slice(rows))

    def of(self, rows: slice, keys: slice) -> IndexInputs:
        """Return the inputs of a slice of query tokens and a slice of keys."""
        # query [b, rows, index_heads, index_dim], weights [b, rows, index_heads]
        return replace(self._with_keys(keys), query=self.query[:, rows], weights=self.weights[:, rows])

    def by_runs(self, runs: Sequence[Run]) -> list[IndexInputs]:
        """Return one set of inputs per run, like :meth:`Operands.by_runs`."""
        queries, weights = split_by_runs(self.query, runs, 1), split_by_runs(self.weights, runs, 1)
        return [
            replace(self._with_keys(slice(low, high)), query=query, weights=weight)
            for query, weight, (_, _, low, high) in zip(queries, weights, runs, strict=True)
        ]

    def _with_keys(self, keys: slice) -> IndexInputs:
        receiver = None if self.key_receiver is None else self.key_receiver[:, keys]  # [b, keys, index_dim]
        return replace(self, key=self.key[:, keys], key_receiver=receiver)

    @classmethod
    def from_megatron(
        cls,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        use_relu: bool = True,
        key_receiver: Tensor | None = None,
    ) -> IndexInputs:
        """Convert from Megatron's layout ``[s, b, ...]``."""
        receiver = None if key_receiver is None else key_receiver.transpose(0, 1)  # [b, s, index_dim]
        # [s, b, ...] -> [b, s, ...]
        return cls(query.transpose(0, 1), key.transpose(0, 1), weights.transpose(0, 1), use_relu, receiver)


@dataclass(frozen=True)
class Rows:
    """Visible keys of each query token on this rank, and the mask of tokens that count in the loss.

    A query token sees the keys ``start <= key < end``. Explicit ranges are needed under context parallelism,
    where tokens of a rank are not contiguous, and for packed documents, where keys start with the document.

    Attributes:
        starts: first visible key of each token, ``[s]`` int32; None: 0 for all tokens.
        ends: end of the visible keys of each token, ``[s]`` int32; None: causal, each token sees keys up to
            itself.
        counted: mask of the tokens that count in the loss, ``[b, s]`` bool; None: all count.
        count: number of counted tokens over all context parallel ranks; None if unknown.
        longest: largest number of keys that a token sees, if the host knows it.
        end: index of the first padding token, if padding is at the end; None: no padding at the end.
        known: host-side description of the ranges of the tokens before ``end``, for the operators; None if
            unknown. Not needed if ``starts`` and ``ends`` are None.
    """

    starts: Tensor | None = None
    ends: Tensor | None = None
    counted: Tensor | None = None
    count: int | None = None
    longest: int | None = None
    end: int | None = None
    known: RowForm | None = None

    @classmethod
    def of_pack(cls, rows: PackRows, device: torch.device) -> Rows:
        """Build from packed documents. Padding sees no key and does not count in the loss."""
        counted = rows.counted
        return cls(
            upload(rows.starts, device),  # [s]
            upload(rows.ends, device),  # [s]
            None if counted is None else upload(counted[None], device),  # [1, s]
            rows.pack.tokens,
            rows.pack.longest,
            rows.end,
            None if rows.sequences is None else RowForm(rows.sequences),
        )

    def without(self, padding: Padding, rank: int, shape: tuple[int, int], device: torch.device) -> Rows:
        """Return a copy with padding excluded from the loss, for whole sequences.

        Args:
            padding: padding of the job's sequences. Sequences of another length are assumed to have no
                padding.
            rank: rank in the context parallel group.
            shape: number of this rank's tokens, and batch size.
            device: device for the mask.
        """
        counted = counted_rows(padding, shape[0], rank)  # [s]
        if counted is None:
            return self
        # counted [s] -> [b, s]: all sequences have the same padding
        return replace(
            self, counted=upload(counted, device).expand(shape[1], -1), count=padding.tokens * shape[1]
        )

    @classmethod
    def to_last_key(cls, rows: int, keys: int, device: torch.device) -> Rows:
        """Build causal ranges for the last ``rows`` of ``keys`` tokens. The last one sees every key."""
        if rows == keys:
            return cls()
        ends = torch.arange(keys - rows, keys, dtype=torch.int32, device=device) + 1  # [s]
        # The host states the form here, so that no operator has to read `ends` back from the device.
        return cls(ends=ends, known=TO_LAST_KEY)

    @property
    def form(self) -> RowForm | None:
        """Description of all ranges for the operators; None if the host does not know it."""
        if self.starts is None and self.ends is None:
            return TO_LAST_KEY
        return self.known if self.end is None else None

    def first(self, rows: int) -> Rows:
        """Return the ranges of the first ``rows`` tokens; the loss already excludes the other tokens."""
        starts, ends = (None if x is None else x[:rows] for x in (self.starts, self.ends))
        counted = self.counted
        if counted is not None:
            # If all tokens that are left count, no mask is needed.
            counted = None if self.count == rows * counted.shape[0] else counted[:, :rows]  # [b, rows]
        return replace(self, starts=starts, ends=ends, counted=counted, end=None)

    def most_visible(self, keys: int) -> int:
        """Return the largest number of keys that a token sees, or an upper bound for it."""
        if self.starts is None:
            return keys
        if self.longest is None and self.ends is not None and self.ends.device.type == "cpu":
            return int((self.ends - self.starts).max()) if self.ends.numel() else 0
        return keys if self.longest is None else self.longest


@dataclass(frozen=True)
class Groups:
    """Process groups for tensor and context parallelism; None if a group has one rank.

    Attributes:
        tensor: tensor parallel group, whose ranks have other heads. The target of the loss is summed over it.
        context: context parallel group, whose ranks have other tokens of the same sequences. Losses add up
            over it.
    """

    tensor: ProcessGroup | None = None
    context: ProcessGroup | None = None

    @classmethod
    def of(cls, pg_collection: Any) -> Groups:
        """Build from Megatron's ``ProcessGroupCollection``, or any object with ``tp`` and ``cp``."""
        return cls(_several(pg_collection, "tp"), _several(pg_collection, "cp"))

    @property
    def context_ranks(self) -> int:
        """Context parallel size."""
        return 1 if self.context is None else self.context.size()


def _several(pg_collection: Any, name: str) -> ProcessGroup | None:
    group: ProcessGroup | None = getattr(pg_collection, name, None)
    return group if group is not None and group.size() > 1 else None


@dataclass(frozen=True)
class LossOptions:
    """Options of the indexer loss.

    Attributes:
        coefficient: factor of the loss, with the layer's weight among the layers whose losses train the same
            indexer.
        on_chosen_keys: whether the loss is over the selected keys only (sparse) or over all visible keys
            (dense).
        per_token: whether the loss is a sum over tokens; otherwise this rank's share of the mean over all
            counted tokens of all context parallel ranks.
        in_backward: callback, if the loss is to be computed in the attention's backward where possible. It is
            called with this rank's share (scalar, with coefficient) and returns the scalar gradient of the
            loss.
        log_divisor: divisor of the loss in the log, which is without the layer's weight.
    """

    coefficient: float
    on_chosen_keys: bool
    per_token: bool = False
    in_backward: Callable[[Tensor], Tensor] | None = None
    log_divisor: float = 1.0


@dataclass(frozen=True)
class Selection:
    """Selected keys, and their scores for the indexer loss."""

    topk_indices: Tensor
    """``[b, s, topk]`` int32, unordered, -1 at the tail."""
    topk_scores: Tensor | None
    """``[b, s, topk]``, differentiable, -inf where the index is -1. None if no loss reads them."""
    inputs: IndexInputs
    scores: Tensor | None = None
    """``[b, s, keys]``. Set only if Megatron's own indexer computed the scores."""
    form: RowForm | None = None
    """Description of the visible ranges, if the host knows it. Tokens have ``min(visible, topk)`` keys."""


@dataclass(frozen=True)
class Attended:
    """Attention output, with intermediate results that the indexer loss reuses."""

    out: Tensor
    """``[s, b, heads * value_dim]``."""
    attention_sum: Tensor | None = None
    """``[b, s, topk]`` fp32: probabilities summed over this rank's heads."""
    lse: Tensor | None = None
    """``[b, s, heads]`` fp32, absorbed form only."""


@dataclass(frozen=True)
class Parts:
    """Functions of Megatron that replace our operators. None: our operator runs.

    Attributes:
        choose: function that selects the keys.
        attend: function that computes attention to the selected keys, ``[b, s, topk]``.
        loss: function that computes the indexer loss, including the coefficient.
    """

    choose: Callable[[], Selection] | None = None
    attend: Callable[[Operands, Tensor], Attended] | None = None
    loss: Callable[[Operands, Selection], Tensor] | None = None


@dataclass(frozen=True)
class Problem:
    """Inputs of one layer's sparse attention, except for the indexer's.

    Attributes:
        operands: inputs of the main attention.
        topk: number of keys per query token.
        rows: range of keys that each query token sees.
        groups: process groups of the layer.
        loss: options of the indexer loss; None for no loss.
        backend: backend of the operators.
        parts: functions of Megatron that replace our operators.
        precision: precision of the selection, one of :data:`mindspeed_dsa.megatron.dsa.PRECISIONS`.
        given: recorded or shared selection to use instead of the indexer's. With a shared selection there is
            a loss only if the selection has the outputs of its indexer.
        serving: outputs that a selecting layer hands on for losses of other layers; None for nothing.
    """

    operands: Operands
    topk: int
    rows: Rows = field(default_factory=Rows)
    groups: Groups = field(default_factory=Groups)
    loss: LossOptions | None = None
    backend: str = "auto"
    parts: Parts = field(default_factory=Parts)
    precision: str = "full"
    given: Chosen | None = None
    serving: Serving | None = None

    @property
    def needs_index(self) -> bool:
        """Return whether sparse attention reads the indexer's inputs. If not, the indexer need not run."""
        keys = self.operands.key.shape[0]
        return needs_index(keys, self.rows, self.topk, self.loss, self.parts, self.given, self.serving)

    @property
    def is_dense(self) -> bool:
        """Return whether attention runs densely, because no token sees more than ``topk`` keys."""
        keys = self.operands.key.shape[0]
        return every_key_is_chosen(keys, self.rows, self.topk, self.parts, self.serving)

    @property
    def reads_scores(self) -> bool:
        """Return whether the indexer loss needs the scores of the selected keys."""
        if self.serving is not None and self.serving.scores:
            return True
        return self.loss is not None and self.loss.on_chosen_keys and self.parts.loss is None

    @property
    def wanted(self) -> LossOptions:
        """Options of the indexer loss. Read only if there is a loss."""
        assert self.loss is not None
        return self.loss

    def first(self, rows: int) -> Problem:
        """Return the problem for the first ``rows`` tokens; the loss already excludes the other tokens."""
        given = None if self.given is None else self.given.of(slice(rows), 0, rows)
        return replace(self, operands=self.operands.first(rows), rows=self.rows.first(rows), given=given)


def needs_index(
    keys: int,
    rows: Rows,
    topk: int,
    loss: LossOptions | None,
    parts: Parts | None = None,
    given: Chosen | None = None,
    serving: Serving | None = None,
) -> bool:
    """Return whether sparse attention reads the indexer's inputs. Can be called before the operands exist.

    Args:
        keys: number of keys of the whole sequence.
        rows: range of keys that each query token sees.
        topk: number of keys per query token.
        loss: options of the indexer loss; None for no loss.
        parts: replacements for our operators.
        given: recorded or shared keys; see :class:`Problem`.
        serving: see :class:`Problem`.
    """
    parts = parts or Parts()
    if given is not None and given.is_shared:
        return False
    if serving is not None:
        return True
    if every_key_is_chosen(keys, rows, topk, parts):
        return loss is not None and (parts.loss is None or parts.choose is None)
    if given is not None and given.missing is None:
        return loss is not None
    return parts.choose is None


def every_key_is_chosen(
    keys: int, rows: Rows, topk: int, parts: Parts, serving: Serving | None = None
) -> bool:
    """Return whether attention is dense: no token sees more than ``topk`` keys, and our operator runs."""
    if serving is not None and serving.scores:
        # The layers above read scores of selected keys, even if these are all visible keys.
        return False
    return parts.attend is None and rows.most_visible(keys) <= topk
