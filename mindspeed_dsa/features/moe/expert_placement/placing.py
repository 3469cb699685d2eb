"""Patches that place experts when a layer is built, when tokens are routed, and in checkpoints.

A slot is a position among the local experts of all ranks. After a layer is built, its experts are assigned to
slots, and their initial weights are sent there. The router still works with expert numbers; the columns of
its results are permuted to slots. Checkpoints store experts by number; formats that cannot do so are
rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.moe import numbering
from mindspeed_dsa.features.moe.expert_placement.feature import FLAG, Options, misfits
from mindspeed_dsa.features.moe.numbering import Numbered
from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.parallel.names import named
from mindspeed_dsa.patches.errors import MindSpeedDSAError, SettingsError
from mindspeed_dsa.runs import expert_load, expert_placement
from mindspeed_dsa.runs.expert_placement import Placement

_RECENT = 100  # last steps of a report that count, because routing changes during training


class _Chosen:
    """Placement used by all models of a session, read when the first block is built."""

    def __init__(self, context: Context[Options]) -> None:
        self._context = context
        # In-process restarts create another world, with ranks that have built no model before.
        self._by_world: WeakKeyDictionary[Any, Placement | None] = WeakKeyDictionary()

    def over(self, ranks: int) -> Placement | None:
        """Return the placement for ``ranks`` expert parallel ranks. A world's first call is collective."""
        world = dist.group.WORLD
        if world not in self._by_world:
            self._by_world[world] = _common(self._context, ranks)
        return self._by_world[world]


def _placing(context: Context[Options]) -> numbering.Visit:
    def place(config: Any, layers: Sequence[Numbered]) -> None:
        # Every rank builds a block first, even without experts, so all ranks make the collective call.
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


in_block, in_mtp_block = numbering.decorators(_placing)


def _common(context: Context[Options], ranks: int) -> Placement | None:
    """Read the placement on rank 0 and broadcast it, because other hosts may not have the files."""
    read: list[Placement | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            read[0] = _read(context, ranks)
        except Exception as error:
            read[0] = error
    dist.broadcast_object_list(read, src=0)
    if isinstance(read[0], Exception):
        raise read[0]
    return read[0]


def _read(context: Context[Options], ranks: int) -> Placement | None:
    options, log = context.options, context.log
    if options.file is not None:
        placement = expert_placement.read(options.file)
        log.info("experts are placed as %s says, over %d ranks", options.file, ranks)
        return placement
    report = next((folder for folder in options.reports if (folder / expert_load.FILE).is_file()), None)
    records, broken = expert_load.recent(report, _RECENT) if report is not None else ([], 0)
    if broken:
        log.warning("%s auto: %d lines among the last of %s are damaged and left out", FLAG, broken, report)
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
    """Assign experts to an MoE layer's slots, and send each expert's weights to its new rank.

    Collective over the expert parallel group.

    Args:
        layer: Megatron's ``MoELayer`` with the default placement.
        order: expert number for each slot.
        context: the feature's context.

    Raises:
        SettingsError: the experts module cannot list the parameters of single experts.
    """
    state = context.megatron("core.parallel_state")
    rank, ranks = state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()
    held = numbering.tensors_by_position(layer.experts)
    if held is None:
        raise SettingsError(
            f"{context.feature}: the checkpoints of {type(layer.experts).__name__} know experts by their "
            f"place on a rank, so {FLAG} works with Megatron's SequentialMLP alone; drop --moe-grouped-gemm"
        )
    numbering.set_order(layer, order)
    # 4 experts on 2 ranks, order (0, 2, 1, 3): slots = [[0, 2], [1, 3]]. Rank 0 sends its position 1 to
    # rank 1 and fills its slot 1 from there: leaving = [[0], [1]], arriving = [[0], [1]].
    room = len(order) // ranks
    slots = [order[other * room : (other + 1) * room] for other in range(ranks)]
    # leaving: local positions sent to each rank, in that rank's slot order. arriving: local slots filled
    # from each rank.
    leaving = [[expert - rank * room for expert in theirs if expert // room == rank] for theirs in slots]
    arriving = [
        [slot for slot, expert in enumerate(slots[rank]) if expert // room == other] for other in range(ranks)
    ]
    group = state.get_expert_model_parallel_group()
    for tensors in zip(*held, strict=True):  # one parameter, for all local experts
        with named("weights of placed experts", layer.layer_number):
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
    filled = [slot for from_rank in arriving for slot in from_rank]
    for slot, values in zip(filled, incoming.split(size), strict=True):
        tensors[slot].copy_(values.view_as(tensors[slot]))


# -- routing ------------------------------------------------------------------------------------


class _Columns(torch.autograd.Function):
    """Permute columns. Backward gathers too, because the backward of indexing would scatter into zeros."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return values.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(1, ctx.inverse), None, None


def route_to_slots(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``TopKRouter.forward`` to permute its results from expert order to slot order.

    Permutes the columns of the probabilities and of the routing map, ``[tokens, experts]``. This is the
    outermost wrapper, so that other wrappers still see expert numbers.
    """
    orders: WeakKeyDictionary[Any, tuple[tuple[int, ...], Tensor, Tensor]] = WeakKeyDictionary()

    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, input, *args, **kwargs)
        order = numbering.order_of(self)
        if order is None:
            return result
        probs, routing_map = result
        cached = orders.get(self)
        if cached is None or cached[0] != order or cached[1].device != probs.device:
            by_slot = torch.tensor(order, device=probs.device)
            # argsort of a permutation is its inverse.
            cached = orders[self] = order, by_slot, by_slot.argsort()
        _, by_slot, inverse = cached
        return _Columns.apply(probs, by_slot, inverse), routing_map.index_select(1, by_slot)

    return forward


# -- checkpoints --------------------------------------------------------------------------------

_BY_PARAMETER = ("fully_reshardable", "fully_sharded_model_space")


class _Numbers(NamedTuple):
    """Stand-in for an expert parallel process group with one expert per rank."""

    number: int
    experts: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.experts


def _one_expert(experts: Any, position: int, number: int) -> AttributeOverride:
    """Return a view of a ``SequentialMLP`` with one expert, on a stand-in rank equal to its number."""
    # Megatron numbers experts by rank x local experts + position: with one per rank, the rank is the number.
    group = _Numbers(number, experts.ep_group.size() * experts.num_local_experts)
    held = [experts.local_experts[position]]
    return AttributeOverride(experts, local_experts=held, num_local_experts=1, ep_group=group)


def number_experts(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``SequentialMLP.sharded_state_dict``: save each expert under its own number."""

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        if not numbering.is_placed(self):
            return original(self, prefix, sharded_offsets, metadata)
        state_dict: dict[str, Any] = {}
        for position, number in enumerate(numbering.experts_of(self, self.ep_group.rank())):
            one = original(_one_expert(self, position, number), prefix, sharded_offsets, metadata)
            # The stand-in holds its expert at position 0; keys get the local position back.
            first, ours = f"{prefix}local_experts.0.", f"{prefix}local_experts.{position}."
            state_dict |= {ours + name.removeprefix(first): value for name, value in one.items()}
        return state_dict

    return sharded_state_dict


def refuse_buckets(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer.sharded_state_dict``: reject formats that store whole buffers."""

    def sharded_state_dict(
        self: Any,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Any = None,
        **kwargs: Any,
    ) -> Any:
        kind = sharding_type or (metadata or {}).get("distrib_optim_sharding_type", _BY_PARAMETER[1])
        if kind not in _BY_PARAMETER:
            how = "is not loaded" if is_loading else "is not saved"
            raise MindSpeedDSAError(
                f"mindspeed_dsa: {context.feature}: the distributed optimizer's state {how} as {kind}: that "
                "format goes by places in a rank's buffers, not by experts, and another placement would give "
                "it to other experts; save with --dist-ckpt-optim-fully-reshardable, and load a checkpoint "
                "in this format with --no-load-optim or without --moe-expert-placement"
            )
        return original(self, model_sharded_state_dict, is_loading, sharding_type, metadata, **kwargs)

    return sharded_state_dict


def refuse_files_of_ranks(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Wrap ``_load_base_checkpoint``: reject checkpoints on disk that store experts by rank."""

    def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        kind = getattr(result[-1], "name", None)
        if kind not in (None, "GLOBAL"):
            raise MindSpeedDSAError(
                f"mindspeed_dsa: {context.feature}: checkpoint {result[1]} is of the kind {kind.lower()}, "
                "which knows experts by their place on a rank; convert it to torch_dist without "
                "--moe-expert-placement first"
            )
        return result

    return _load_base_checkpoint
