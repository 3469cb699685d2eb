"""One call of a DSA core attention: what a layer was given, and what was asked for.

Every adapter builds one at its door: the patched core attention (0.16 to 0.18), the backport's, and that of
context parallel ranks from 0.19 on. What lies behind takes the call and nothing else of Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.packs import PackRows
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa.indexer_loss import coefficient, indexer_loss
from mindspeed_dsa.features.dsa.key_exchange.exchange import KeyExchange, groups_of, key_exchange
from mindspeed_dsa.features.dsa.problem import Groups, LossOptions, Rows
from mindspeed_dsa.features.dsa.sparse_attention import in_runs
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.megatron.selection_source import (
    NUMBER,
    Chosen,
    LayerRows,
    RowRun,
    SelectionSource,
    current,
    sources_of,
)


@dataclass(frozen=True)
class Call:
    """Arguments of a core attention.

    Attributes:
        layer: a ``DSAttention``, Megatron's or ours; its ``training``, ``config``, ``softmax_scale``,
            ``layer_number`` and ``indexer`` are read. A layer that shares a selection has no indexer.
        query: as in :class:`Operands`.
        key: likewise; on several context parallel ranks also what the exchange put in its place.
        value: likewise.
        x: hidden states ``[sequence, batch, hidden]``, as many rows as queries, or, where earlier rows of
            the sequence have run before, as many as keys; a rank's part of them under sequence parallelism.
        qr: latent queries ``[sequence, batch, q_lora_rank]``, likewise; packed by Megatron without the batch.
        options: the parts that run on our operators.
        megatron: the layer's Megatron.
        packed_seq_params: Megatron's description of documents, for a batch of 1; None for whole sequences.
    """

    layer: Any
    query: Tensor
    key: Tensor
    value: Tensor
    x: Tensor
    qr: Tensor
    options: Options
    megatron: Megatron
    packed_seq_params: Any = None

    @cached_property
    def groups(self) -> Groups:
        """Ranks with the other heads and the other rows."""
        return Groups.of(groups_of(self.layer))

    @cached_property
    def documents(self) -> PackRows | None:
        """Documents that the rows belong to; None for whole sequences."""
        if self.packed_seq_params is None:
            return None
        group = groups_of(self.layer).cp
        return PackRows.of(self.packed_seq_params, self.query.shape[0], group)

    @cached_property
    def exchange(self) -> KeyExchange | None:
        """The layer's key exchange; None without context parallelism."""
        return key_exchange(self.layer, self.options, self.megatron, self.documents)

    def whole_rows(self, rows: Rows) -> Rows:
        """Return the rows of whole sequences, of which those of padding do not count.

        Where this rank has them all, and no part of the attention is Megatron's, they are left out.
        """
        group, padding = self.groups.context, self.options.padding
        rank = 0 if group is None else group.rank()
        shape = (self.query.shape[0], self.query.shape[1])
        rows = rows.without(padding, rank, shape, self.query.device)
        if rows.counted is not None and group is None and self.options.all_ours:
            rows = replace(rows, end=padding.tokens)
        return rows

    def whole_runs(self, exchange: KeyExchange) -> list[tuple[int, int, int, int]]:
        """Return the runs of this rank's rows of whole sequences, of which those of padding see no key."""
        padding, rows = self.options.padding, self.query.shape[0]
        runs = exchange.runs(rows)
        if not padding.rows or rows * exchange.ranks != padding.length:
            return runs
        found = []
        for first, end, low, high in runs:
            data = max(first, end - max(0, high - padding.tokens))
            if data > first:
                found.append((first, data, low, high - (end - data)))
            if end > data:
                found.append((data, end, 0, 0))
        return found

    @property
    def earlier(self) -> int:
        """Rows of the sequence before those of the query, of which keys and the indexer's inputs are here."""
        rows, keys = self.query.shape[0], self.key.shape[0]
        return keys - rows if self.exchange is None and self.x.shape[0] == keys > rows else 0

    @property
    def topk(self) -> int:
        """Keys per row."""
        topk: int = self.layer.config.dsa_indexer_topk
        return topk

    @cached_property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """Runs of this rank's rows, on the host: see :class:`.selection_source.RowRun`."""
        if self.documents is not None:
            return self.documents.runs()
        if self.exchange is not None:
            return self.whole_runs(self.exchange)
        rows, keys, padding = self.query.shape[0], self.key.shape[0], self.options.padding
        if not padding.rows or keys != padding.length or keys != rows:
            return [(0, rows, 0, keys)]
        return [(0, padding.tokens, 0, padding.tokens), (padding.tokens, rows, 0, 0)]

    @cached_property
    def sources(self) -> list[SelectionSource]:
        """Sources of the layer's selections."""
        return sources_of(self.layer)

    @cached_property
    def layer_rows(self) -> LayerRows:
        """This rank's rows of the layer, as sources of selections know them."""
        rows, batch = self.query.shape[:2]
        microbatch = current().microbatch
        tokens = None if microbatch is None else microbatch.tokens
        return LayerRows(
            layer=vars(self.layer).get(NUMBER, 0),
            find_runs=lambda: [RowRun(*run) for run in self.runs],
            batch=batch,
            rows=rows,
            keys=self.key.shape[0] if self.exchange is None else rows * self.exchange.ranks,
            topk=self.topk,
            tokens=tokens if tokens is not None and tokens.shape == (batch, rows) else None,
        )

    @cached_property
    def chosen(self) -> Chosen | None:
        """Keys that the rows attend to whatever the indexer says; None where it selects them."""
        answers = (source.choose(self.layer_rows) for source in self.sources)
        chosen = next((answer for answer in answers if answer is not None), None)
        if chosen is None or chosen.is_shared:
            return chosen
        if self.exchange is not None and self.documents is None and not in_runs(self.query.device):
            # Padding of whole sequences attends like other rows there, and has experts: the last bits of
            # weights' gradients are those of the recorded run only if it attends to the same keys.
            chosen = chosen.without([run for run in self.layer_rows.find_runs() if run.low == run.high])
        return chosen.to(self.query.device)

    @property
    def shares(self) -> bool:
        """Return whether a layer below has selected the keys."""
        return self.chosen is not None and self.chosen.is_shared

    def hand_on(self, chosen: Chosen, mass_of: Callable[[Tensor], Tensor]) -> None:
        """Tell the sources which keys the rows attended to; arguments as of :meth:`SelectionSource.took`."""
        if not self.shares:
            for source in self.sources:
                source.took(self.layer_rows, chosen, mass_of)

    @property
    def indexer_inputs(self) -> tuple[Tensor, Tensor]:
        """Hidden states and latent queries, with a batch; detached, as the loss must not train the model."""
        qr = self.qr.detach()
        is_packed = self.packed_seq_params is not None and qr.dim() == 2
        return self.x.detach(), qr.unsqueeze(1) if is_packed else qr

    def check_keys(self) -> None:
        """Refuse keys that are not those of the whole sequence.

        Raises:
            ValueError: there are fewer, or more, keys than the context parallel ranks have queries; or
                several ranks have keys by head, as in the prefill of generation, which nobody has gathered.
        """
        exchange = key_exchange(self.layer, self.options, self.megatron)
        rows, keys = self.query.shape[0], self.key.shape[0]
        is_absorbed, ranks = self.value.dim() == 3, 1 if exchange is None else exchange.ranks
        is_whole = keys == rows * ranks and (ranks == 1 or is_absorbed)
        if is_whole or self.earlier or (exchange is not None and exchange.is_on_its_way):
            return
        problem = f"fused-dsa: {rows} queries came with {keys} keys"
        if ranks == 1:
            raise ValueError(
                f"{problem}, as in generation with a key-value cache; Megatron-core 0.16 to 0.18 cannot "
                "decode with DSA, fused or not"
            )
        if is_absorbed:
            raise ValueError(f"{problem} on one of {ranks} context parallel ranks, not {rows * ranks}")
        raise ValueError(
            f"{problem} by head on one of {ranks} context parallel ranks, which share keys in absorbed form "
            "only; train with --use-dsa-absorb, and generate with --context-parallel-size 1"
        )

    def loss_options(self, all_rows: int) -> LossOptions | None:
        """Return the indexer loss of a training step; None where there is none.

        Args:
            all_rows: of the microbatch's whole sequences, over all context parallel ranks.
        """
        config = self.layer.config
        learns = self.layer.training and torch.is_grad_enabled() and not self.shares
        if not (learns and coefficient(config) > 0):
            return None
        # The callback lives until backward: it must not hold this call, and with it the layer's tensors.
        ours, layer, group = indexer_loss(self.megatron), self.layer, self.groups.context

        def log_and_start(share: Tensor) -> Tensor:
            ours.log(share, layer, group)
            return ours.gradient(share, all_rows)

        return LossOptions(
            coefficient=coefficient(config),
            on_chosen_keys=config.dsa_indexer_use_sparse_loss,
            per_token=ours.takes_sums(config),
            in_backward=log_and_start if self.options.fuse_kl_in_backward else None,
        )

    def with_loss(self, out: Tensor, loss: Tensor | None, all_rows: int) -> Tensor:
        """Log a loss, and return the output to whose backward it is attached; ``all_rows`` as above."""
        if loss is None:
            return out
        ours = indexer_loss(self.megatron)
        ours.log(loss, self.layer, self.groups.context)
        return ours.attach(out, loss, all_rows)
