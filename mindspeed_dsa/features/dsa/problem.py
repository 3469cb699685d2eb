"""One layer's sparse attention as tensors: operands, the rank's rows, and the groups with the rest."""

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
from mindspeed_dsa.megatron.selection_source import Chosen
from mindspeed_dsa.ops.row_ranges import TO_LAST_KEY, RowForm
from mindspeed_dsa.platforms.host_pool import upload


@dataclass(frozen=True)
class Operands:
    """Inputs of the main attention, in Megatron's layout, sequence first, and the factor of its scores.

    By head: query and key ``[s, b, heads, dim]``, value ``[s, b, heads, value_dim]``. In absorbed form: query
    ``[s, b, heads, latent + rope]``, key ``[s, b, 1, latent + rope]``, and instead of the value its
    up-projection ``[heads, value_dim, latent]``, which is applied to the attention output. Under
    context parallelism the query has this rank's rows, the key those of the whole sequence in its own order.
    ``key_receiver``, if there is one, takes the gradient of an absorbed key in fp32, to be summed over ranks.
    ``epilog``, if there is one, is the compiled form of the value's up-projection. ``query_rope``, if there
    is one, is the rotary part of an absorbed query, ``[s, b, heads, rope]``, and ``query`` the latent one.
    ``key_rope``, ``[s, b, 1, rope]``, is the same of the key, with a receiver of its own; it comes beside
    ``query_rope`` only.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    softmax_scale: float
    key_receiver: Tensor | None = None
    epilog: Callable[[Tensor, Tensor], Tensor] | None = None
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    key_rope_receiver: Tensor | None = None

    def whole(self) -> Operands:
        """Return these operands with query and key in one piece each."""
        if self.query_rope is None:
            return self
        whole = replace(self, query=torch.cat([self.query, self.query_rope], dim=-1), query_rope=None)
        if self.key_rope is None:
            return whole
        # A receiver of both would have to be made, as large as a gradient.
        key = torch.cat([self.key, self.key_rope], dim=-1)
        return replace(whole, key=key, key_receiver=None, key_rope=None, key_rope_receiver=None)

    def first(self, rows: int) -> Operands:
        """Return it without the rows from this one on."""
        value = self.value if self.absorbed else self.value[:rows]
        rope = None if self.query_rope is None else self.query_rope[:rows]
        return replace(self._with_keys(slice(rows)), query=self.query[:rows], query_rope=rope, value=value)

    def by_runs(self, runs: Sequence[Run]) -> list[Operands]:
        """Return the rows of each run with its keys; in absorbed form, whose value belongs to no row.

        Args:
            runs: runs of all rows, in their order.
        """
        queries = _by_runs(self.query, runs, 0)
        ropes = [None] * len(runs) if self.query_rope is None else _by_runs(self.query_rope, runs, 0)
        return [
            replace(self._with_keys(slice(low, high)), query=query, query_rope=rope)
            for query, rope, (_, _, low, high) in zip(queries, ropes, runs, strict=True)
        ]

    def _with_keys(self, keys: slice) -> Operands:
        receiver, rope, rope_receiver = (
            None if one is None else one[keys]
            for one in (self.key_receiver, self.key_rope, self.key_rope_receiver)
        )
        return replace(
            self, key=self.key[keys], key_receiver=receiver, key_rope=rope, key_rope_receiver=rope_receiver
        )

    @property
    def absorbed(self) -> bool:
        """Return whether ``value`` is the up-projection."""
        return self.value.dim() == 3

    @property
    def latent(self) -> int:
        """Width of the latent part of an absorbed key, which is its value."""
        return self.value.shape[-1]

    def up_projected(self, latent_out: Tensor) -> Tensor:
        """Project ``[b, s, heads, latent]`` to ``[s, b, heads * value_dim]``."""
        if self.epilog is not None:
            return self.epilog(latent_out, self.value)
        return torch.einsum("bshc,hdc->sbhd", latent_out, self.value).flatten(2)

    def detached(self) -> tuple[Tensor, Tensor]:
        """Return query ``[b, s, heads, dim]`` and key ``[b, s, dim]``, by head ``[b, s, heads, dim]``."""
        key = self.key.detach().transpose(0, 1)
        return self.query.detach().transpose(0, 1), key.squeeze(2) if self.absorbed else key

    def ropes(self) -> dict[str, Tensor | None]:
        """Return the operators' arguments for rotary parts that are apart."""
        query, key = self.query_rope, self.key_rope
        return {
            "query_rope": None if query is None else query.transpose(0, 1),
            "key_rope": None if key is None else key.squeeze(2).transpose(0, 1),
        }


Run = tuple[int, int, int, int]
"""First row, end of the rows, begin and end of the keys that the last of them sees; none for padding."""


def _by_runs(tensor: Tensor, runs: Sequence[Run], dim: int) -> Sequence[Tensor]:
    """Return each run's rows; the gradients of all are put together once."""
    sizes = [end - first for first, end, _, _ in runs]
    return tensor.split(sizes, dim)  # type: ignore[no-any-return]


def keeps_parts_apart(device: torch.device) -> bool:
    """Return whether this device's operators want the latent and the rotary part of a query apart."""
    return device.type == "npu"


def query_and_key(query: Tensor, query_rope: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Form what passes for query and key through Megatron's layer and checkpoints, in absorbed form.

    That is one query; or, where parts stay apart, the latent one, with the rotary one behind the key.

    Args:
        query: ``[s, b, heads, latent]``.
        query_rope: ``[s, b, heads, rope]``.
        key: ``[s, b, 1, latent + rope]``.
    """
    if keeps_parts_apart(query.device):
        # Whoever frees what is recomputed frees this, and no copy that Megatron's layer makes of it.
        return query.contiguous(), torch.cat([key, query_rope.flatten(2).unsqueeze(2)], dim=-1)
    return torch.cat([query, query_rope], dim=-1), key


def parts_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the key, and the query's rotary part if it lies behind that: see :func:`query_and_key`.

    Args:
        query: of any form; the latent part, if parts are apart.
        key: of any form.
        value: ``[heads, value_dim, latent]``, or by head.
    """
    latent, heads = value.shape[-1], query.shape[2]
    if value.dim() != 3 or query.shape[-1] != latent:
        return key, None
    rope = (key.shape[-1] - latent) // (1 + heads)
    key, of_query = key.split([latent + rope, heads * rope], dim=-1)
    return key, of_query[-query.shape[0] :].squeeze(2).unflatten(-1, (heads, rope))


@dataclass(frozen=True)
class IndexInputs:
    """Query, key and weights of the indexer, in the operators' layout."""

    query: Tensor
    """``[batch, sequence, index_heads, index_dim]``."""
    key: Tensor
    """``[batch, sequence, index_dim]``."""
    weights: Tensor
    """``[batch, sequence, index_heads]``, every scale included."""
    use_relu: bool = True
    """Whether products are clamped at zero."""
    key_receiver: Tensor | None = None
    """As of :class:`Operands`."""

    def first(self, rows: int) -> IndexInputs:
        """Return it without the rows from this one on."""
        return self.of(slice(rows), slice(rows))

    def of(self, rows: slice, keys: slice) -> IndexInputs:
        """Return some rows and some keys."""
        return replace(self._with_keys(keys), query=self.query[:, rows], weights=self.weights[:, rows])

    def by_runs(self, runs: Sequence[Run]) -> list[IndexInputs]:
        """Return the rows of each run with its keys, as :meth:`Operands.by_runs` does."""
        queries, weights = _by_runs(self.query, runs, 1), _by_runs(self.weights, runs, 1)
        return [
            replace(self._with_keys(slice(low, high)), query=query, weights=weight)
            for query, weight, (_, _, low, high) in zip(queries, weights, runs, strict=True)
        ]

    def _with_keys(self, keys: slice) -> IndexInputs:
        receiver = None if self.key_receiver is None else self.key_receiver[:, keys]
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
        """Convert from Megatron's layout, sequence first."""
        receiver = None if key_receiver is None else key_receiver.transpose(0, 1)
        return cls(query.transpose(0, 1), key.transpose(0, 1), weights.transpose(0, 1), use_relu, receiver)


@dataclass(frozen=True)
class Rows:
    """Ranges of keys that this rank's queries see, and which queries count in the loss.

    A row sees the keys from its start up to, but excluding, its end. Context parallel ranks have rows that
    are not contiguous in the sequence, and packed sequences have rows that start late.

    Attributes:
        starts: ``[s]`` int32; None: every row starts at the first key.
        ends: ``[s]`` int32; None: plain causal rows, each of which ends after its own key.
        counted: ``[b, s]`` bool, true for rows that count in the loss; None: all do.
        count: rows that count on all context parallel ranks, where that is known.
        longest: the most keys that a row sees, where the host knows it.
        end: the rows from this one on are padding, and so are their keys; None: none are, or only others.
        known: the form of the rows before ``end``, where the host knows it: no device is asked for what the
            tensors hold. Without starts and ends it is known.
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
        """Build of documents in one row of tokens; padding sees no key and does not count."""
        counted = rows.counted
        return cls(
            upload(rows.starts, device),
            upload(rows.ends, device),
            None if counted is None else upload(counted[None], device),
            rows.pack.tokens,
            rows.pack.longest,
            rows.end,
            None if rows.sequences is None else RowForm(rows.sequences),
        )

    def without(self, padding: Padding, rank: int, shape: tuple[int, int], device: torch.device) -> Rows:
        """Return these rows of whole sequences, of which those of padding do not count.

        Args:
            padding: of the job's sequences; others keep all rows.
            rank: in the context parallel group.
            shape: this rank's rows, and the batch.
            device: of the rows.
        """
        counted = counted_rows(padding, shape[0], rank)
        if counted is None:
            return self
        return replace(
            self, counted=upload(counted, device).expand(shape[1], -1), count=padding.tokens * shape[1]
        )

    @classmethod
    def to_last_key(cls, rows: int, keys: int, device: torch.device) -> Rows:
        """Build causal rows, the last of which sees every key."""
        if rows == keys:
            return cls()
        ends = torch.arange(keys - rows, keys, dtype=torch.int32, device=device) + 1
        # As made a line above: nobody has to read it back from the device.
        return cls(ends=ends, known=TO_LAST_KEY)

    @property
    def form(self) -> RowForm | None:
        """Form of all rows, for the operators; None where the host does not know it."""
        if self.starts is None and self.ends is None:
            return TO_LAST_KEY
        return self.known if self.end is None else None

    def first(self, rows: int) -> Rows:
        """Return it without the rows from this one on, none of which counts."""
        starts, ends = (None if x is None else x[:rows] for x in (self.starts, self.ends))
        counted = self.counted
        if counted is not None:
            counted = None if self.count == rows * counted.shape[0] else counted[:, :rows]
        return replace(self, starts=starts, ends=ends, counted=counted, end=None)

    def most_visible(self, keys: int) -> int:
        """Return how many of ``keys`` keys a row sees at most, as far as is known without a device."""
        if self.starts is None:
            return keys
        if self.longest is None and self.ends is not None and self.ends.device.type == "cpu":
            return int((self.ends - self.starts).max()) if self.ends.numel() else 0
        return keys if self.longest is None else self.longest


@dataclass(frozen=True)
class Groups:
    """Ranks that hold the rest of the problem; None where there are none.

    Attributes:
        tensor: ranks with the other heads; the loss's target is summed over them.
        context: ranks with the other rows of the same sequences; their shares of the loss add up.
    """

    tensor: ProcessGroup | None = None
    context: ProcessGroup | None = None

    @classmethod
    def of(cls, pg_collection: Any) -> Groups:
        """Build from Megatron's ``ProcessGroupCollection``, or any object with ``tp`` and ``cp``."""
        return cls(_several(pg_collection, "tp"), _several(pg_collection, "cp"))

    @property
    def context_ranks(self) -> int:
        """Number of ranks that share the rows of a sequence."""
        return 1 if self.context is None else self.context.size()


def _several(pg_collection: Any, name: str) -> ProcessGroup | None:
    group: ProcessGroup | None = getattr(pg_collection, name, None)
    return group if group is not None and group.size() > 1 else None


@dataclass(frozen=True)
class LossOptions:
    """Requested indexer loss.

    Attributes:
        coefficient: factor of the loss.
        on_chosen_keys: the sparse loss, over the selected keys; otherwise over all visible ones.
        per_token: the sum over rows; otherwise this rank's share of the mean over the rows of all context
            parallel ranks that count.
        in_backward: compute the loss inside the attention's backward pass, where possible. Called there
            with the share, coefficient included; returns the gradient that it starts with, a scalar.
    """

    coefficient: float
    on_chosen_keys: bool
    per_token: bool = False
    in_backward: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Selection:
    """Selected keys, and the scores that the indexer loss needs."""

    topk_indices: Tensor
    """``[batch, sequence, topk]`` int32, in any order, -1 at the tail."""
    topk_scores: Tensor | None
    """``[batch, sequence, topk]``, differentiable; -inf where the index is -1. None: no loss reads them."""
    inputs: IndexInputs
    scores: Tensor | None = None
    """``[batch, sequence, sequence]``, only if Megatron's own indexer computed them."""
    form: RowForm | None = None
    """Under which rows list as many keys as they see, at most ``topk``; None: the host does not know."""


@dataclass(frozen=True)
class Attended:
    """Output of the attention, and intermediate results for the indexer loss."""

    out: Tensor
    """``[s, b, heads * value_dim]``."""
    attention_sum: Tensor | None = None
    """``[b, s, topk]`` fp32: probabilities summed over this rank's heads."""
    lse: Tensor | None = None
    """``[b, s, heads]`` fp32, of the absorbed form."""


@dataclass(frozen=True)
class Parts:
    """Code that replaces our operators; None: the operator runs.

    Attributes:
        choose: selects the keys.
        attend: attends to the selected keys, ``[b, s, topk]``.
        loss: the indexer loss, coefficient included.
    """

    choose: Callable[[], Selection] | None = None
    attend: Callable[[Operands, Tensor], Attended] | None = None
    loss: Callable[[Operands, Selection], Tensor] | None = None


@dataclass(frozen=True)
class Problem:
    """Sparse attention of one layer's rows, with everything but the indexer's inputs.

    Attributes:
        operands: of the main attention.
        topk: keys per row.
        rows: which keys each row sees.
        groups: ranks with the other heads and the other rows.
        loss: the indexer loss; None for none.
        backend: of the operators.
        parts: code that replaces our operators.
        precision: by which keys are selected, one of :data:`mindspeed_dsa.megatron.dsa.PRECISIONS`.
        given: keys that rows attend to instead of those of the highest scores; there is no loss if they are
            shared.
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

    @property
    def needs_index(self) -> bool:
        """Return whether the indexer's inputs are read; if not, the indexer need not be run."""
        keys = self.operands.key.shape[0]
        return needs_index(keys, self.rows, self.topk, self.loss, self.parts, self.given)

    @property
    def is_dense(self) -> bool:
        """Return whether no row sees more than ``topk`` keys."""
        return every_key_is_chosen(self.operands.key.shape[0], self.rows, self.topk, self.parts)

    @property
    def reads_scores(self) -> bool:
        """Return whether the indexer loss is computed from the scores of the selected keys."""
        return self.loss is not None and self.loss.on_chosen_keys and self.parts.loss is None

    @property
    def wanted(self) -> LossOptions:
        """The indexer loss, where there is one."""
        assert self.loss is not None
        return self.loss

    def first(self, rows: int) -> Problem:
        """Return it without the rows from this one on, none of which counts."""
        given = None if self.given is None else self.given.of(slice(rows), 0, rows)
        return replace(self, operands=self.operands.first(rows), rows=self.rows.first(rows), given=given)


def needs_index(
    keys: int,
    rows: Rows,
    topk: int,
    loss: LossOptions | None,
    parts: Parts | None = None,
    given: Chosen | None = None,
) -> bool:
    """Return whether sparse attention reads the indexer's inputs, before its operands are there.

    Args:
        keys: of the whole sequence.
        rows: which of them each row sees.
        topk: keys per row.
        loss: the indexer loss; None for none.
        parts: code that replaces our operators.
        given: as of :class:`Problem`.
    """
    parts = parts or Parts()
    if every_key_is_chosen(keys, rows, topk, parts):
        return loss is not None and (parts.loss is None or parts.choose is None)
    if given is not None and given.missing is None:
        return loss is not None
    return parts.choose is None


def every_key_is_chosen(keys: int, rows: Rows, topk: int, parts: Parts) -> bool:
    """Return whether no row sees more than ``topk`` keys, so that the attention is dense."""
    return parts.attend is None and rows.most_visible(keys) <= topk
