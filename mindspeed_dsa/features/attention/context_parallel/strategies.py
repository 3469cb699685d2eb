"""Strategy of each layer, by its number, and the process groups that it exchanges in.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from mindspeed_dsa.context_parallel.algorithms import registered
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.attention.context_parallel.feature import DEFAULT, Options
from mindspeed_dsa.features.attention.context_parallel.head_exchange import HeadExchange
from mindspeed_dsa.features.attention.context_parallel.ring import Ring
from mindspeed_dsa.patches.errors import SettingsError

_built: WeakKeyDictionary[ProcessGroup, tuple[int, ProcessGroup, ProcessGroup]] = WeakKeyDictionary()
"""By context parallel group: ranks that exchange heads, their group and that of the ring."""


def make_strategy(
    attention: Any, layer_number: int, comm_type: str | None, context: Context[Options]
) -> ContextParallelStrategy:
    """Build the strategy that a layer's algorithm names.

    Args:
        attention: Megatron's core attention.
        layer_number: from 1.
        comm_type: what Megatron's configuration says of this layer, where no flag did.
        context: the feature's.

    Raises:
        SettingsError: dense attention has no such algorithm.
    """
    group = _context_parallel_group(attention, context.megatron)
    name = context.options.of_layer(layer_number, (comm_type or DEFAULT).replace("_", ""))
    own = registered(name)
    if own is not None:
        return own(group)
    if name == "p2p":
        return Ring(group)
    if name == "a2a":
        return HeadExchange(group)
    if name == "a2a+p2p":
        return HeadExchange(group, *_neighbours_and_ring(attention, group, context))
    raise SettingsError(
        f"{context.feature}: layer {layer_number} has dense attention, for which there is no {name}; use "
        "p2p, a2a or a2a+p2p"
    )


def _groups_of_layer(attention: Any) -> Any:
    """Return ``pg_collection`` since 0.15, ``model_comm_pgs`` in 0.13 and 0.14."""
    return getattr(attention, "pg_collection", None) or getattr(attention, "model_comm_pgs", None)


def _context_parallel_group(attention: Any, megatron: Megatron) -> ProcessGroup:
    group = getattr(_groups_of_layer(attention), "cp", None)
    if group is None:
        group = megatron("core.parallel_state").get_context_parallel_group()
    return group  # type: ignore[no-any-return]


def _neighbours_and_ring(
    attention: Any, group: ProcessGroup, context: Context[Options]
) -> tuple[ProcessGroup, ProcessGroup]:
    """Return Megatron's hierarchical groups where it has made them of these sizes, or our own."""
    levels = getattr(_groups_of_layer(attention), "hcp", None)
    find = getattr(context.megatron("core.parallel_state"), "get_hierarchical_context_parallel_groups", None)
    if levels is None and find is not None:
        levels = find(check_initialized=False)
    degree = context.options.ulysses_degree or (levels[0].size() if levels else 0)
    if not degree or group.size() % degree:
        raise SettingsError(
            f"dense-context-parallel: hybrid_cp_algo over {group.size()} ranks needs --ulysses-degree-in-cp, "
            "a divisor of that"
        )
    sizes = [degree, group.size() // degree]
    if levels and [level.size() for level in levels] == sizes:
        return levels[0], levels[1]
    if group not in _built or _built[group][0] != degree:
        ranks, own = dist.get_process_group_ranks(group), group.rank()
        first = own - own % degree
        # Only members call: every context parallel rank builds the same layers in the same order.
        _built[group] = (
            degree,
            *(
                dist.new_group(members, use_local_synchronization=True)
                for members in (ranks[first : first + degree], ranks[own % degree :: degree])
            ),
        )
    return _built[group][1:]


class _FromOne(list[str]):
    """Entries by a layer's number, from 1; layers after the last one have the last one's."""

    def __getitem__(self, number: Any) -> Any:
        return super().__getitem__(min(number, len(self)) - 1)


def count_layers_from_one(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerLayer.__init__``, which takes its number for an index of ``cp_comm_type``."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        names = config.cp_comm_type
        if not isinstance(names, list):
            original(self, config, *args, **kwargs)
            return
        config.cp_comm_type = _FromOne(names)
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.cp_comm_type = names

    return __init__
