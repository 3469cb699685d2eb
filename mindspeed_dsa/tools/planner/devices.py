"""Devices: memory, speed and links, as their vendors state them, and what of it jobs are assumed to reach."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace

from mindspeed_dsa.patches.errors import SettingsError


@dataclass(frozen=True)
class Device:
    """One rank's device; rates are per second and direction.

    Attributes:
        name: of :data:`DEVICES`.
        memory: GiB.
        tflops: bf16 matrix products, without sparsity.
        hbm: GB of memory traffic.
        node: devices with the fast link between them.
        link: GB on it.
        network: GB between nodes, per device.
        host: GB between device and host.
        matmul: share of ``tflops`` that large products reach; likewise the next two.
        attention: of attention.
        sparse: of attention and indexer on gathered keys.
    """

    name: str
    memory: float
    tflops: float
    hbm: float
    node: int
    link: float
    network: float
    host: float
    matmul: float = 0.6
    attention: float = 0.5
    sparse: float = 0.35


DEVICES = {
    device.name: device
    for device in (
        Device("a100", 80, 312, 2039, 8, 300, 25, 25),
        Device("h100", 80, 989, 3350, 8, 450, 50, 50),
        Device("h200", 141, 989, 4800, 8, 450, 50, 50),
        Device("b200", 180, 2250, 8000, 8, 900, 50, 50),
        Device("910b", 64, 376, 1600, 8, 196, 25, 25),
        # One of the two dies of a 128 GB card; a supernode links 384 cards.
        Device("a3", 64, 376, 1600, 768, 196, 25, 50),
        Device("cpu", 64, 0.2, 20, 1, 1, 1, 10),
    )
}
"""By the name that ``--device`` takes."""


def device(name: str, **other: float | None) -> Device:
    """A device of the table, with other figures where given.

    Raises:
        SettingsError: it is not in the table.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.3)
        meant = f"; did you mean {near[0]}?" if near else "."
        raise SettingsError(
            f"mindspeed_dsa plan: there is no device {name!r}{meant} The table has {', '.join(DEVICES)}; for "
            "another one name the closest, and --device-memory, --device-tflops and the links beside it"
        )
    given = {key: value for key, value in other.items() if value is not None}
    for key, value in given.items():
        if not 0 < value < math.inf:
            raise SettingsError(f"mindspeed_dsa plan: --device-{key} {value:g}: give a number above 0")
    return replace(found, **given)  # type: ignore[arg-type]
