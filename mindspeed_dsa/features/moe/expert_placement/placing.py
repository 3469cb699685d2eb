"""Experts get their slots when their layer has been built, and their initial weights follow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe.expert_placement.feature import FLAG, Options, misfits
from mindspeed_dsa.megatron import moe_layers
from mindspeed_dsa.megatron.moe_layers import Numbered
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs import expert_load, expert_placement
from mindspeed_dsa.runs.expert_placement import Placement

_RECENT = 100  # steps of a report that a placement is made of: routers change in training


class _Chosen:
    """The placement that all models of a session get, from their first block on."""

    def __init__(self, context: Context[Options]) -> None:
        self._context = context
        self._known = False
        self._placement: Placement | None = None

    def over(self, ranks: int) -> Placement | None:
        """Return the placement; the first call is a collective one, which all ranks make."""
        if not self._known:
            self._placement, self._known = _common(self._context, ranks), True
        return self._placement


def in_block(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__``."""
    return moe_layers.after_block(original, context, _placing(context))


def in_mtp_block(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionBlock.__init__``."""
    return moe_layers.after_mtp_block(original, context, _placing(context))


def _placing(context: Context[Options]) -> moe_layers.Visit:
    def place(config: Any, layers: Sequence[Numbered]) -> None:
        # Every rank builds a block first, also one without experts: all of them come here.
        placement = context.state(_Chosen).over(config.expert_model_parallel_size)
        if placement is None:
            return
        wrong = list(misfits(placement, config.num_moe_experts, config.expert_model_parallel_size))
        missing = [number for number, _ in layers if number not in placement.orders]
        if missing and context.options.file is not None:
            wrong.append(f"no layers {missing}, which have experts")
        if wrong:
            raise SettingsError(f"{context.feature}: the placement is of another model: {'; '.join(wrong)}")
        for number, layer in layers:
            order = placement.orders.get(number)
            if order is not None and list(order) != sorted(order):
                move(layer, order, context)

    return place


def _common(context: Context[Options], ranks: int) -> Placement | None:
    """What rank 0 reads, for all ranks; the files may be on its machine alone."""
    found: list[Placement | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            found[0] = _read(context, ranks)
        except Exception as error:
            found[0] = error
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _read(context: Context[Options], ranks: int) -> Placement | None:
    options, log = context.options, context.log
    if options.file is not None:
        placement = expert_placement.read(options.file)
        log.info("experts are placed as %s says, over %d ranks", options.file, ranks)
        return placement
    report = next((each for each in options.reports if (each / expert_load.FILE).is_file()), None)
    records, broken = expert_load.recent(report, _RECENT) if report is not None else ([], 0)
    if broken:
        log.warning(
            "%s auto: %d lines among the last of %s are damaged and left out",
            FLAG,
            broken,
            report,
        )
    if not records:
        looked = ", ".join(map(str, options.reports)) or "nowhere: no --load, --save or load report was given"
        log.warning(
            "%s auto: there is no report of experts' load (looked in %s); every expert stays in its own slot",
            FLAG,
            looked,
        )
        return None
    loads = expert_load.totals(records)
    placement = expert_placement.place(loads, ranks)
    for layer, order in placement.orders.items():
        before, after = expert_placement.improvement(loads[layer], order, ranks)
        log.info("layer %d: most loaded rank over the mean %.2f -> %.2f", layer, before, after)
    log.info("experts are placed by the load in %s, over %d ranks", report, ranks)
    return placement


def move(layer: Any, order: Sequence[int], context: Context[Options]) -> None:
    """Give an MoE layer's slots their experts, and bring each expert's weights to the rank that holds it now.

    All ranks of the expert parallel group call this together.

    Args:
        layer: Megatron's ``MoELayer``, whose experts are in their own slots.
        order: experts by slot.
        context: the feature's.
    """
    state = context.megatron("core.parallel_state")
    rank, ranks = (
        state.get_expert_model_parallel_rank(),
        state.get_expert_model_parallel_world_size(),
    )
    held = moe_layers.tensors_by_position(layer.experts)
    if held is None:
        raise SettingsError(
            f"{context.feature}: the checkpoints of {type(layer.experts).__name__} know experts by their "
            f"place on a rank, so {FLAG} works with Megatron's SequentialMLP alone; drop --moe-grouped-gemm"
        )
    moe_layers.set_order(layer, order)
    room = len(order) // ranks
    slots = [order[each * room : (each + 1) * room] for each in range(ranks)]
    # Positions that go to each rank, in its order; and slots of ours that come from each rank.
    leaving = [[expert - rank * room for expert in each if expert // room == rank] for each in slots]
    arriving = [
        [at for at, expert in enumerate(slots[rank]) if expert // room == each] for each in range(ranks)
    ]
    group = state.get_expert_model_parallel_group()
    for tensors in zip(*held, strict=True):  # the same parameter of all experts
        _exchange(tensors, leaving, arriving, group)


@torch.no_grad()
def _exchange(
    tensors: Sequence[Tensor], leaving: Sequence[list[int]], arriving: Sequence[list[int]], group: Any
) -> None:
    device = platforms.current().device
    sent = [tensors[position].detach().flatten() for to in leaving for position in to]
    size = tensors[0].numel()
    outgoing = torch.cat(sent).to(device)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(
        incoming,
        outgoing,
        [size * len(slots) for slots in arriving],
        [size * len(positions) for positions in leaving],
        group=group,
    )
    for slot, values in zip([slot for each in arriving for slot in each], incoming.split(size), strict=True):
        tensors[slot].copy_(values.view_as(tensors[slot]))
