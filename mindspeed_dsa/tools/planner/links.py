"""Time of transfers on the links of a device: the fast link of its node, and the network between nodes."""

from __future__ import annotations

import math
from functools import lru_cache

from mindspeed_dsa.tools.planner.communication import Transfer
from mindspeed_dsa.tools.planner.devices import Device
from mindspeed_dsa.tools.planner.job import Job
from mindspeed_dsa.tools.planner.routing import Routing, copies

_RINGS = ("all-gather", "reduce-scatter", "all-reduce")


def strides(job: Job) -> dict[str, tuple[int, int]]:
    """Return a dict from process group to size and rank stride, for Megatron's order tp-cp-ep-dp-pp."""
    layout = job.layout
    inner = layout.tp * layout.cp
    return {
        "TP": (layout.tp, 1),
        "CP": (layout.cp, layout.tp),
        "DP": (layout.replicas, layout.tp),
        "FSDP": (job.shards, layout.tp),
        "PP": (layout.pp, inner * layout.dp),
        "ETP": (layout.etp, 1),
        "EP": (layout.ep, layout.etp),
        "EDP": (layout.expert_replicas, layout.etp * layout.ep),
        "EFSDP": (job.expert_shards, layout.etp * layout.ep),
        "embedding": (2, inner * layout.dp * max(1, layout.pp - 1)),
    }


def seconds(job: Job, device: Device, transfer: Transfer) -> float:
    """Return the time of a transfer if no other transfer uses its links."""
    ranks, stride = strides(job)[transfer.group]
    # TP 8 with stride 1 is inside a node of 8; DP with stride 8 has only one rank per node.
    inside = max(1, min(ranks, device.node // stride)) if stride < device.node else 1
    link, network = device.link * device.linking * 1e9, device.network * device.networking * 1e9
    if inside >= ranks:
        return transfer.nbytes / link
    if transfer.collective == "all-to-all":
        # An all-to-all uses both links at once: EP 16 on nodes of 8 sends 8 / 15 of its bytes over the
        # network.
        outside = (ranks - inside) / (ranks - 1)
        return transfer.nbytes * max(outside / network, (1 - outside) / link)
    if transfer.collective == "dispatch":
        beyond = _share_beyond(job, ranks, math.ceil(ranks / inside))
        return transfer.nbytes * max(beyond / network, 1 / link)
    if transfer.collective in _RINGS:
        # Each rank of a node carries a ring of its own: 8 ranks use the network devices of all 8.
        return transfer.nbytes / min(link, inside * network)
    return transfer.nbytes / network


def _share_beyond(job: Job, ranks: int, nodes: int) -> float:
    """Return the bytes that a dispatch sends between nodes, over the bytes that its ranks receive."""
    return _received(job.model.routing, nodes) / _received(job.model.routing, ranks)


@lru_cache(maxsize=256)
def _received(routing: Routing, parts: int) -> float:
    """Return the copies of a token that leave its own part."""
    return copies(routing, parts) * (parts - 1) / parts
