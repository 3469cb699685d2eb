"""Devices that jobs are planned for: rates, memory, and the shares of both that jobs reach."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.settings import did_you_mean


@dataclass(frozen=True)
class Device:
    """Rates and memory of one rank's device; rates are per second and direction.

    Attributes:
        name: name in :data:`DEVICES`.
        memory: GiB, as reported by the device.
        tflops: TFLOP/s of dense bf16 matrix products.
        hbm: GB/s of device memory.
        node: number of devices connected by the fast link.
        link: GB/s of the fast link.
        network: GB/s between nodes, per device.
        host: GB/s between device and host.
        host_memory: assumed GiB of a node's host.
        host_devices: number of devices that share the host.
        reserve: GiB for the device context and collectives.

    :data:`CONSTANTS` explains the others, which say how much of these rates jobs reach.
    """

    name: str
    memory: float
    tflops: float
    hbm: float
    node: int
    link: float
    network: float
    host: float
    host_memory: float
    host_devices: int = 8
    matmul: float = 0.66
    attention: float = 0.55
    sparse: float = 0.35
    moving: float = 0.65
    linking: float = 0.7
    networking: float = 0.8
    host_experts: float = 9.0
    host_dense: float = 2.0
    host_graphs: float = 0.65
    gap: float = 0.6
    behind_pairs: float = 0.5
    fp8: float = 1.15
    reserve: float = 3.0


DEVICES = {
    device.name: device
    for device in (
        Device("a100", 79.2, 312, 2039, 8, 300, 25, 25, 1024),
        Device("h100", 79.2, 989, 3350, 8, 450, 50, 50, 2048),
        Device("h200", 139.8, 989, 4800, 8, 450, 50, 50, 2048),
        Device("b200", 178.4, 2250, 8000, 8, 900, 50, 50, 2048),
        Device("910b", 61.0, 376, 1600, 8, 196, 25, 25, 1024),
        # One of the two dies of a 128 GB card. A supernode links 384 cards = 768 dies; a host has 8 cards.
        Device("a3", 61.0, 376, 1600, 768, 196, 25, 50, 2048, 16),
        # The CPU shares the host's memory, and no device context takes a part of it.
        Device(
            "cpu", 64, 0.2, 20, 1, 1, 1, 10, 64, 1, host_experts=0.0, host_dense=0.0, gap=0.0, reserve=0.0
        ),
    )
}
"""Dict from the name for ``--device`` to the device."""


@dataclass(frozen=True)
class Constant:
    """Explanation of a constant of :class:`Device`.

    Attributes:
        meaning: its meaning, with its unit.
        source: its origin.
    """

    meaning: str
    source: str


_FITTED = "nine published training runs; nine others were used as a check"
_ASSUMED = "assumed"
CONSTANTS = {
    "matmul": Constant(
        "share of tflops that matrix products reach, beside the time to move their bytes", _FITTED
    ),
    "attention": Constant("share of tflops that attention reaches", _FITTED),
    "sparse": Constant("share of tflops that sparse attention and indexer reach", _ASSUMED),
    "moving": Constant("share of hbm that kernels reach", _FITTED),
    "linking": Constant("share of link that collectives reach", _FITTED),
    "networking": Constant("share of network that collectives reach", _FITTED),
    "host_experts": Constant(
        "milliseconds in which the host launches forward and backward of a layer with experts",
        "published runs with small kernels; 5 to 11 by release",
    ),
    "host_dense": Constant("the same for a dense layer", _ASSUMED),
    "host_graphs": Constant(
        "share of host_experts and host_dense with CUDA graphs",
        "two published pairs of runs: steps of 0.78 and 0.80",
    ),
    "gap": Constant(
        "milliseconds in which the device waits in forward and backward of a layer with experts",
        "profile of a published run: idle for 0.62",
    ),
    "behind_pairs": Constant(
        "share of experts' transfers that paired passes hide",
        "profile of a published run: 37 % of all communication; steps of 0.76 to 0.89",
    ),
    "fp8": Constant(
        "factor by which fp8 shortens a step",
        "median of ten published pairs of runs, from 0.84 to 1.36",
    ),
}
"""Dict from the name of a device's constant to its explanation."""


def device(name: str, **other: float | None) -> Device:
    """Return a device of :data:`DEVICES`, with some attributes replaced.

    Raises:
        SettingsError: the name is not in the table, or a value is not positive.
    """
    entry = DEVICES.get(name.lower())
    if entry is None:
        meant = did_you_mean(name.lower(), DEVICES, 0.3) or "."
        raise SettingsError(
            f"mindspeed_dsa plan: there is no device {name!r}{meant} The table has {', '.join(DEVICES)}; for "
            "another one name the closest, and --device-memory, --device-tflops and the links beside it"
        )
    figures = {key: value for key, value in other.items() if value is not None}
    for key, value in figures.items():
        if key != "reserve" and not 0 < value < math.inf:
            raise SettingsError(f"mindspeed_dsa plan: --device-{key} {value:g}: give a number above 0")
    return replace(entry, **figures)  # type: ignore[arg-type]
