"""Patches for layers that share selections: construction, attention and recomputation.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.key_exchange.exchange import groups_of
from mindspeed_dsa.features.dsa.selections.feature import check_sharing
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.megatron.frozen_inputs import checkpoint_learning
from mindspeed_dsa.megatron.selection_source import (
    NUMBER,
    PLACE,
    Carrying,
    Place,
    current,
    place_of,
)
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError

# -- places: layers with an indexer, and the source layers of the others ------------------------


class _Running:
    """State of a session: the MTP layer that is being built, and the layer whose attention is running."""

    def __init__(self, context: Context[Options]) -> None:
        # Layers in the multi-token prediction layer that is being built; None outside one.
        self.of_mtp: list[Any] | None = None
        # Place of the computing layer whose Megatron attention is running.
        self.place: Place | None = None


def place_in_decoder(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerLayer.__init__`` to store whether its attention selects or reuses keys.

    The indexer of a layer that only reuses another layer's selection is removed.
    """
    running = context.state(_Running)

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        sharing, inner = Sharing.of(config), running.of_mtp
        attention = getattr(getattr(self, "self_attention", None), "core_attention", None)
        if not hasattr(attention, "indexer"):
            is_needed = inner is None and sharing.is_on and context.options.learns_served
            if is_needed and not sharing.computes(self.layer_number):
                place = decoder_place(sharing, self.layer_number, config.num_layers)
                raise not_learned(place, context.options)
            return
        # Inside an MTP layer, the number is only known to place_in_mtp.
        if inner is not None:
            inner.append(self)
        else:
            vars(attention)[NUMBER] = self.layer_number
        if not sharing.is_on:
            return
        require(context, check_sharing, config)
        if inner is None:
            put(attention, decoder_place(sharing, self.layer_number, config.num_layers))
            watch_losses(self, context.options)

    return __init__


def place_in_mtp(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionLayer.__init__``; like :func:`place_in_decoder` for its inner layer."""
    running = context.state(_Running)

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        inner = running.of_mtp = []
        try:
            original(self, config, *args, **kwargs)
        finally:
            running.of_mtp = None
        sharing = Sharing.of(config)
        for layer in inner:
            attention = layer.self_attention.core_attention
            vars(attention)[NUMBER] = config.num_layers + self.layer_number
            if sharing.is_on:
                put(attention, mtp_place(sharing, self.layer_number, config))
                watch_losses(layer, context.options)

    return __init__


def decoder_place(sharing: Sharing, layer: int, layers: int) -> Place:
    """Return the :class:`Place` of decoder layer ``layer`` (from 1) of ``layers``: selects or reuses."""
    is_last = layer == layers or sharing.computes(layer + 1)
    source = sharing.source(layer)
    return Place(
        name=f"layer {layer}",
        source=f"layer {source}",
        hands_on=sharing.computes(layer) and not is_last,
        is_last=is_last,
        served=sum(sharing.source(other) == source for other in range(1, layers + 1)),
    )


def mtp_place(sharing: Sharing, layer: int, config: Any) -> Place:
    """Return the :class:`Place` of MTP layer ``layer`` (from 1): selects keys, or reuses them."""
    layers = config.mtp_num_layers
    repeats = bool(getattr(config, "mtp_use_repeated_layer", False)) and sharing.mtp_shares and layers > 1
    sources = [sharing.mtp_source(other) for other in range(1, layers + 1)]
    source = sources[layer - 1]
    # A layer that repeats is never last: its next run reads the same selection.
    is_last = not repeats and (layer == layers or sharing.mtp_computes(layer + 1))
    name = "layer {} of multi-token prediction"
    return Place(
        name=name.format(layer),
        source=name.format(source),
        hands_on=repeats or (source == layer and not is_last),
        is_last=is_last,
        repeats=repeats,
        served=layers if repeats else sources.count(source),
    )


def put(attention: Any, place: Place) -> None:
    """Store ``place`` in a ``DSAttention``, and remove its indexer if the layer never selects keys."""
    vars(attention)[PLACE] = place
    if not place.computes and attention.indexer is not None:
        # The groups were the indexer's before 0.19; keep them.
        attention.pg_collection = groups_of(attention)
        attention.indexer = None
    if hasattr(attention, "skip_topk"):  # 0.19 and later
        attention.index_share = place.hands_on or not place.computes
        attention.skip_topk = not place.computes


def watch_losses(layer: Any, options: Options) -> None:
    """Check after each training forward of a ``TransformerLayer`` that shares that an indexer learns it.

    The layer must have read the selection of a layer below from here. Otherwise it has no indexer loss, and
    all other losses look right.
    """
    place = place_of(layer.self_attention.core_attention)
    if place is None or place.computes or not options.learns_served:
        return
    reads = 0

    def note(module: Any, given: Any) -> None:
        nonlocal reads
        reads = current().reads

    def check(module: Any, given: Any, output: Any) -> None:
        # A first run of a checkpoint has no losses; its recomputation has.
        if module.training and torch.is_grad_enabled() and current().reads == reads:
            raise not_learned(place, options)

    layer.register_forward_pre_hook(note)
    layer.register_forward_hook(check)


def not_learned(place: Place, options: Options) -> SettingsError:
    """Return the error for a layer whose attention no indexer can learn."""
    return SettingsError(
        f"--dsa-indexer-loss-layers {options.loss_layers}: {place.name} does not read the selection of "
        f"{place.source} from this library, so no indexer learns its attention. Its attention is not "
        "Megatron's or ours, as in a fork that carries selections itself; omit the flag, or train with a "
        "released Megatron-core"
    )


# -- attention: reading and storing selections ---------------------------------------------------


def attend_with_megatron(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward`` to share selections with Megatron's own attention before 0.19."""
    running = context.state(_Running)

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place, selections = place_of(self), current()
        if context.options.any or place is None:
            return original(self, query, key, value, *args, **kwargs)
        if not selections.is_shared_by(place):
            running.place = place
            try:
                return original(self, query, key, value, *args, **kwargs)
            finally:
                running.place = None
        (topk_indices,) = selections.read(place).topk_indices
        selections.release(place)
        dsa = context.megatron("core.transformer.experimental_attention_variant.dsa")
        out: Tensor = dsa.unfused_dsa_fn(query, key, value, topk_indices, self.softmax_scale)
        return out

    return forward


def hand_on_indices(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Tensor]:
    """Decorate ``unfused_dsa_fn``, Megatron's attention to selected keys, to store the selection."""
    running = context.state(_Running)

    def unfused_dsa_fn(
        query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if running.place is not None:
            current().store(running.place, topk_indices)
        return original(query, key, value, topk_indices, *args, **kwargs)

    return unfused_dsa_fn


def select_anew_in_mtp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MultiTokenPredictionBlock.forward`` to drop the selection before and after the block."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        current().latest = None
        result = original(self, *args, **kwargs)
        current().latest = None
        return result

    return forward


# In Megatron-core 0.19 and later, each attention forward fetches two dictionaries by layer number. A
# computing layer writes its entries at the end. A sharing layer reads its source's entries, indices first.


def repeat_with_megatron(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward`` for an MTP layer that the MTP block runs several times.

    Only the layer's first run in a block forward selects keys; later runs reuse them. Before each run, the
    wrapper sets the attribute ``skip_topk``, which Megatron reads.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        place = place_of(self)
        if place is not None and place.repeats:
            self.skip_topk = current().is_shared_by(place)
        return original(self, *args, **kwargs)

    return forward


def hold_indices(context: Context[Options]) -> Callable[..., Any]:
    """Replace ``_get_index_share_topk_holder``, Megatron's dict from layer, by :class:`_Indices`."""
    return _holder(_Indices)


def hold_lengths(context: Context[Options]) -> Callable[..., Any]:
    """Replace ``_get_index_share_topk_length_holder``, a dict from layer, by :class:`_Lengths`."""
    return _holder(_Lengths)


def _holder(kind: Callable[[Place], Any]) -> Callable[..., Any]:
    def of_layer(self: Any, packed_seq_params: Any = None, attention_mask: Any = None) -> Any:
        return kind(placed(self))

    return of_layer


def placed(attention: Any) -> Place:
    """Return the :class:`Place` of a ``DSAttention``: whether it selects keys or reuses a selection.

    Raises:
        RuntimeError: the attention was built outside a ``TransformerLayer``.
    """
    place = place_of(attention)
    if place is None:
        raise RuntimeError(
            "dsa-shared-selections: a DSAttention that shares selections was built outside of Megatron's "
            "TransformerLayer, which knows its number; build it inside one, or use --dsa-indexer-topk-freq 1"
        )
    return place


class _OneEntry(MutableMapping[int, Any]):
    """Mapping that has the current selection under every layer number."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __contains__(self, layer: object) -> bool:
        return True

    def __delitem__(self, layer: int) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Indices(_OneEntry):
    """Indices of the current selection, ``[batch, rows, topk]``."""

    def __getitem__(self, layer: int) -> Tensor | None:
        return current().read(self._place).topk_indices[0]

    def __setitem__(self, layer: int, topk_indices: Tensor) -> None:
        current().store(self._place, topk_indices)


class _Lengths(_OneEntry):
    """Number of keys per query token in the current selection, ``[batch, rows]``."""

    def __getitem__(self, layer: int) -> Tensor | None:
        lengths = current().read(self._place).lengths
        # Megatron reads the lengths last, so the layer is done with the selection.
        current().release(self._place)
        return lengths

    def __setitem__(self, layer: int, lengths: Tensor) -> None:
        latest = current().latest
        if latest is not None:
            latest.lengths = lengths


# -- recomputation ------------------------------------------------------------------------------


def carry_selection(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate checkpoint functions: the recomputation uses the same shared selection as the forward.

    Weights inside the checkpoint get gradients even if no input requires one (frozen modules before it).
    """

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint_learning(original, Carrying(function), *args, **kwargs)

    return checkpoint
