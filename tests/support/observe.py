"""Observation of a job: gradients of its first and last step, and every choice of routers and indexers.

Choices can be forced, which removes ties from a comparison. A wrong gradient can be planted, which shows that
a comparison notices one. An indexer chooses twice: the keys that a row attends to, and, by the sign of each
head's product with a key, whether the ReLU passes that head's gradient on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mindspeed_dsa.context_parallel.layout import Layout, Zigzag
from tests.support import contexts
from tests.support.gradient_pieces import Piece, pieces_of_gradients

Key = tuple[str, int]
"""``("topk", layer)``, ``("sign", layer)`` or ``("router", layer)``; layers count from 1 as in Megatron."""

Choices = dict[Key, npt.NDArray[np.bool_]]
"""Choices over all microbatches of all steps.

``topk``: ``[microbatch, batch, query, key]``, the keys that a query attends to. ``sign``: ``[microbatch,
batch, query, topk, head]``, whether the product of an index head's query and each of these keys, in ascending
order, is positive. ``router``: ``[microbatch, batch, token, expert]``.
"""


@dataclass(frozen=True)
class Place:
    """Coordinates of a rank.

    Attributes:
        data, data_size: rank and size of the data parallel group.
        tensor: rank in the tensor parallel group.
        context, context_size: rank and size of the context parallel group.
        sequence_parallel: whether tensor parallel ranks hold different tokens outside attention.
    """

    data: int
    data_size: int
    tensor: int
    context: int
    context_size: int
    sequence_parallel: bool


@dataclass(frozen=True)
class Fault:
    """Factor for the gradients of every parameter with this ending, in every step."""

    parameter: str
    factor: float


class Observer:
    """Observer that is attached to a job's stepper before its first step.

    Args:
        args: job's arguments.
        gradients: whether to keep gradients of the first and the last step, in ``self.gradients``.
        forced: choices for the whole batch, to replace the model's own.
        fault: gradient to spoil.
        signs: whether to record the signs of indexers' products.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        gradients: bool,
        forced: Choices | None,
        fault: Fault | None,
        signs: bool = False,
    ) -> None:
        self._args, self._forced, self._fault = args, forced, fault
        self._signs, self._keeps_gradients = signs, gradients
        self.gradients: list[list[Piece]] = []
        self._noted: dict[Key, list[npt.NDArray[np.bool_]]] = defaultdict(list)
        self._rows: dict[Key, list[npt.NDArray[np.int64]]] = defaultdict(list)
        self._uses: dict[tuple[Key, bool], int] = defaultdict(int)
        self._first_halves: dict[Key, Tensor] = {}
        self._step = 0
        self.place: Place | None = None
        self.fused_selections = 0

    @property
    def choices(self) -> Choices:
        """This rank's choices: its own microbatches, and its own tokens under sequence parallelism."""
        return {key: np.stack(calls) for key, calls in self._noted.items()}

    @property
    def rows(self) -> dict[Key, npt.NDArray[np.int64]]:
        """Positions ``[microbatch, row]`` of this context parallel rank's rows in the whole sequence."""
        return {key: np.stack(calls) for key, calls in self._rows.items()}

    def attach(self, stepper: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
        from megatron.core.transformer.moe.router import TopKRouter

        self.place = Place(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
            self._args.sequence_parallel,
        )
        for module in (module for chunk in stepper.model for module in chunk.modules()):
            if isinstance(module, DSAttention) and module.indexer is not None:
                self._watch_indexer(module.indexer, ("topk", module.layer_number))
            elif isinstance(module, TopKRouter):
                self._watch_router(module, ("router", module.layer_number))
        optimizer_step = stepper.optimizer.step

        def step() -> Any:
            self._before_optimizer(stepper.model)
            return optimizer_step()

        stepper.optimizer.step = step

    def _watch_indexer(self, indexer: Any, key: Key) -> None:
        original, compute = indexer.forward_with_scores, indexer._compute_index_scores
        projected: list[Tensor] = []
        # For the running call, if choices are forced: the selected keys, and their signs.
        forced: list[Tensor] = []

        def compute_scores(query: Tensor, weights: Tensor, index_key: Tensor) -> Any:
            projected[:] = query.detach().transpose(0, 1), index_key.detach().transpose(0, 1)
            if len(forced) == 2:
                return _scores_with_signs(query, weights, index_key, *forced)
            return compute(query, weights, index_key)

        def forward_with_scores(*args: Any, **kwargs: Any) -> Any:
            signs = ("sign", key[1])
            forced.clear()
            if self._forced is not None:
                names = (key, signs) if signs in self._forced else (key,)
                forced[:] = [torch.from_numpy(self._next_forced(name, args[0].shape[1])) for name in names]
            scores, indices = original(*args, **kwargs)
            if forced:
                # [batch, query, key] -> [batch, query, topk]. Rows with fewer visible keys than topk are
                # filled up with future keys, which the caller masks, as in the model's own selection.
                indices = forced[0].float().topk(indices.shape[-1], dim=-1).indices
            keys, topk = scores.shape[-1], indices.shape[-1]
            selection = selected_keys(indices, keys, self._own_rows(keys))
            self._note(key, selection)
            if self._signs:
                positive = (
                    forced[1] if len(forced) == 2 else products(*projected, in_order(selection, topk)) > 0
                )
                self._note(signs, positive)
            return scores, indices

        indexer.forward_with_scores = forward_with_scores
        if self._signs:
            indexer._compute_index_scores = compute_scores

    @contextlib.contextmanager
    def watching_fused_indexers(self) -> Iterator[None]:
        """Watch the functions in which fused DSA makes the choices of all layers."""
        from mindspeed_dsa.features.dsa import core_attention, megatron_parts, sparse_attention

        attend, layer = core_attention.attend, 0

        def attend_in_layer(call: Any) -> Tensor:
            nonlocal layer
            layer, indexer = call.layer.layer_number, call.layer.indexer
            if indexer is None:  # attends to another layer's selection
                return attend(call)
            # Force and record the choice here, also if Megatron's own indexer makes it.
            with mock.patch.object(indexer, "forward_with_scores", _plain(indexer)):
                return attend(call)

        def watched(choose: Callable[..., Any], fused: bool) -> Callable[..., Any]:
            def choose_keys(*args: Any, **kwargs: Any) -> Any:
                key, signs, positive = ("topk", layer), ("sign", layer), None
                selection = choose(*args, **kwargs)
                self.fused_selections += fused
                if self._forced is not None:
                    batch, rows = selection.topk_indices.shape[:2]
                    if signs in self._forced:
                        positive = torch.from_numpy(self._next_forced(signs, batch, rows))
                    forced = torch.from_numpy(self._next_forced(key, batch, rows))
                    forced = forced[..., : selection.inputs.key.shape[1]]
                    selection = _chosen_instead(selection, forced, positive)
                query, index_key = selection.inputs.query.detach(), selection.inputs.key.detach()
                keys, topk = index_key.shape[1], selection.topk_indices.shape[-1]
                positions = self._own_rows(keys)[-query.shape[1] :]
                selected = selected_keys(selection.topk_indices, keys, positions)
                self._note(key, selected)
                if self._signs and positive is None:
                    positive = products(query, index_key, in_order(selected, topk)) > 0
                if positive is not None:
                    self._note(signs, positive)
                return selection

            return choose_keys

        with (
            mock.patch.object(core_attention, "attend", attend_in_layer),
            mock.patch.object(sparse_attention, "select_keys", watched(sparse_attention.select_keys, True)),
            mock.patch.object(
                megatron_parts, "choose_with_megatron", watched(megatron_parts.choose_with_megatron, False)
            ),
        ):
            yield

    def _watch_router(self, router: Any, key: Key) -> None:
        original = router.routing
        if self._forced is not None:
            router.router_replay = _ForcedRouting(lambda tokens: self._next_forced(key, tokens=tokens))

        def routing(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            probs, routing_map = original(logits, *args, **kwargs)
            # [token * batch, expert] -> [batch, token, expert]
            chosen = routing_map.view(-1, logits.shape[1], routing_map.shape[-1]).transpose(0, 1)
            self._note(key, chosen)
            return probs, routing_map

        router.routing = routing

    def _own_rows(self, length: int) -> Tensor:
        """Return positions of this context parallel rank's rows in the sequence, or in the running pack."""
        from mindspeed_dsa.context_parallel.packs import layout_of
        from mindspeed_dsa.features.attention.packs import delivery

        assert self.place is not None
        ranks, context = self.place.context_size, contexts.running("pack-documents")
        running = None if context is None else context.state(delivery.Step).running
        if running is None or ranks == 1:
            layout: Layout = Zigzag(ranks, self._args.cp_block_rows or 0)
        else:
            layout = layout_of(running.params, running.pack, ranks)
        return layout.rows_of_rank(self.place.context, length)

    @property
    def _parts_of_a_sequence(self) -> int:
        """Number of ranks that share the rows outside of attention."""
        assert self.place is not None
        tensor = self._args.tensor_model_parallel_size if self.place.sequence_parallel else 1
        return int(self.place.context_size * tensor)

    def _note(self, key: Key, chosen: Tensor) -> None:
        """Record choices of a microbatch; choices of its halves come in two calls."""
        if _recomputing():
            return
        if _is_half():
            if key not in self._first_halves:
                self._first_halves[key] = chosen.clone()
                return
            chosen = _joined(self._first_halves.pop(key), chosen, self._args.micro_batch_size)
        parts = self._parts_of_a_sequence if key[0] == "router" else self.place.context_size
        self._noted[key].append(chosen.numpy().copy())
        self._rows[key].append(self._own_rows(chosen.shape[1] * parts).numpy())

    def _next_forced(self, key: Key, batch: int = 0, rows: int = 0, tokens: int = 0) -> npt.NDArray[np.bool_]:
        """Return this rank's part of the choices for the current microbatch, or for a half of it.

        A layer sees the microbatches in order, and recomputes them in the same order.

        Args:
            key: choosing module.
            batch: sequences of the call, if it may be a half of them.
            rows: rows of each sequence, likewise.
            tokens: tokens of a router's call; the second half's call chooses for both.
        """
        assert self._forced is not None
        assert self.place is not None
        use = key, _recomputing()
        first = _is_half() and key not in self._first_halves
        call = self._uses[use]
        # Both halves of a microbatch use the same choices, so the call counts at the second half.
        self._uses[use] += not first
        # With 2 data parallel ranks, rank 1 has microbatches 1, 3, 5 of the batch.
        choices = self._forced[key][call * self.place.data_size + self.place.data]
        # Padding rows, which a single process lacks, choose nothing.
        widths = [(0, 0)] * choices.ndim
        for axis in (1, 2) if key[0] == "topk" else (1,):
            widths[axis] = (0, self._args.seq_length - choices.shape[axis])
        choices = np.pad(choices, widths)
        positions = self._rows[key][call] if _recomputing() else self._own_rows(choices.shape[1]).numpy()
        choices = choices[:, positions]
        if key[0] == "router" and self.place.sequence_parallel:
            length = choices.shape[1] // self._args.tensor_model_parallel_size
            choices = choices[:, self.place.tensor * length :][:, :length]
        if not _is_half() or tokens == choices.shape[0] * choices.shape[1]:
            return choices
        batch = batch or (tokens // choices.shape[1] or 1)
        rows = rows or (tokens // batch or choices.shape[1])
        return choices[:batch, :rows] if first else choices[-batch:, -rows:]

    def _before_optimizer(self, model: Sequence[Any]) -> None:
        if self._fault is not None:
            for chunk in model:
                for name, parameter in chunk.named_parameters():
                    if name.endswith(self._fault.parameter):
                        parameter.main_grad.mul_(self._fault.factor)
        self._step += 1
        if self._keeps_gradients and self._step in (1, self._args.train_iters):
            self.gradients.append(pieces_of_gradients(self._args, model))


class _ForcedRouting:
    """Replacement for Megatron's ``RouterReplay`` in a router."""

    def __init__(self, chosen: Callable[[int], npt.NDArray[np.bool_]]) -> None:
        self._chosen = chosen

    def get_replay_topk(self, scores: Tensor, topk: int, *args: Any) -> tuple[Tensor, Tensor]:
        """Map ``scores`` ``[token * batch, expert]`` to the forced scores and their experts."""
        experts = torch.from_numpy(self._chosen(len(scores)))  # [batch, token, expert]
        indices = experts.transpose(0, 1).reshape(scores.shape).float().topk(topk, dim=1).indices
        return scores.gather(1, indices), indices


def _plain(indexer: Any) -> Callable[..., Any]:
    """Return the indexer's original method, without the observer's replacement."""
    return type(indexer).forward_with_scores.__get__(indexer)


def _chosen_instead(selection: Any, chosen: Tensor, positive: Tensor | None) -> Any:
    """Return the same selection with other keys, ``[batch, query, key]`` bool, and these signs, if any."""
    from mindspeed_dsa.ops.lightning_indexer import selected_scores

    indices = in_order(chosen, selection.topk_indices.shape[-1])
    query, key, weights = selection.inputs.query, selection.inputs.key, selection.inputs.weights
    if positive is None:
        scores = selected_scores(query, key, weights, indices)
    else:
        clamped = products(query, key, indices) * positive
        scores = (clamped * weights[:, :, None]).sum(-1).masked_fill(indices < 0, -torch.inf)
    return dataclasses.replace(selection, topk_indices=indices, topk_scores=scores)


def _scores_with_signs(
    query: Tensor, weights: Tensor, index_key: Tensor, chosen: Tensor, positive: Tensor
) -> Tensor:
    """Return Megatron's index scores ``[batch, query, key]`` with these signs for the ReLU at chosen keys.

    Args:
        query: queries ``[query, batch, head, dim]``.
        weights: head weights ``[query, batch, head]``.
        index_key: keys ``[key, batch, dim]``.
        chosen: selection ``[batch, query, key]`` bool.
        positive: signs ``[batch, query, topk, head]`` bool, for the chosen keys in ascending order.
    """
    dots = torch.einsum("sbhd,tbd->bsht", query.float(), index_key.float())
    # An additional column takes the empty entries.
    passed = torch.cat([dots > 0, torch.zeros_like(dots[..., :1], dtype=torch.bool)], dim=-1)
    indices = in_order(chosen, positive.shape[2]).long()
    columns = indices.where(indices >= 0, dots.shape[-1])[:, :, None].expand(-1, -1, dots.shape[2], -1)
    passed.scatter_(-1, columns, positive.transpose(-1, -2))
    return (dots * passed[..., :-1] * weights.float().transpose(0, 1)[..., None]).sum(2)


def in_order(chosen: Tensor, topk: int) -> Tensor:
    """Convert ``[batch, query, key]`` bool to ``[batch, query, topk]`` int32, ascending, -1 at the end."""
    position = torch.arange(chosen.shape[-1], dtype=torch.int32)
    ordered = position.where(chosen, chosen.shape[-1]).sort(dim=-1).values[..., :topk]
    return ordered.masked_fill(ordered == chosen.shape[-1], -1)


def products(query: Tensor, key: Tensor, indices: Tensor) -> Tensor:
    """Return products of index heads' queries and chosen keys, ``[batch, query, topk, head]``; 0 if empty.

    Args:
        query: queries ``[batch, query, head, dim]``.
        key: keys ``[batch, key, dim]``.
        indices: chosen keys ``[batch, query, topk]``, -1 for empty entries.
    """
    batch = torch.arange(key.shape[0])[:, None, None]
    found = torch.einsum("bqhd,bqkd->bqkh", query, key[batch, indices.clamp_min(0).long()])
    return found.masked_fill((indices < 0)[..., None], 0)


def selected_keys(topk_indices: Tensor, keys: int, positions: Tensor) -> Tensor:
    """Convert ``[batch, query, topk]`` to bool ``[batch, query, key]``.

    Future keys are left out: they pad the rows of queries that see fewer than ``topk`` keys.

    Args:
        topk_indices: selected keys of this rank's queries.
        keys: number of keys.
        positions: positions ``[query]`` of the queries among the keys.
    """
    # An additional column takes the empty entries.
    selected = torch.zeros(*topk_indices.shape[:2], keys + 1, dtype=torch.bool)
    selected.scatter_(-1, topk_indices.long().where(topk_indices >= 0, keys), True)
    return selected[..., :keys] & (torch.arange(keys) <= positions[:, None])


def _is_half() -> bool:
    """Return whether one of two halves of a microbatch calls this."""
    from mindspeed_dsa.features.moe.batch_overlap.choice import State

    context = contexts.running("moe-batch-overlap")
    return context is not None and context.state(State).half is not None


def _joined(first: Tensor, second: Tensor, sequences: int) -> Tensor:
    """Join choices of both halves, ``[batch, row, ...]``; a first half of rows sees fewer keys."""
    if sequences > 1:
        return torch.cat((first, second))
    missing = second.shape[2] - first.shape[2]
    padding = [0, 0] * (first.dim() - 3) + [0, missing]
    return torch.cat((torch.nn.functional.pad(first, padding), second), dim=1)


def _recomputing() -> bool:
    """Return whether this runs inside a backward pass, or as a pair's second forward concurrent with one.

    The first forward of a Megatron checkpoint has its mark, too, but no graph.
    """
    from megatron.core.tensor_parallel.random import is_checkpointing

    inside = torch._C._current_graph_task_id() != -1
    return inside or bool(is_checkpointing() and torch.is_grad_enabled())
