"""The same training with and without an optimizer's feature, in several layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

JOB = "tests.support.optimizer_job"
OFF: dict[str, Any] = {}
PLAIN: dict[str, Any] = {}
DISTRIBUTED = {"distributed": True}
OVERLAP = {"distributed": True, "overlap": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, PLAIN),
    "dp1, distributed": (1, DISTRIBUTED),
    "dp1, distributed, overlap": (1, OVERLAP),
    "dp2": (2, PLAIN),
    "dp2, distributed": (2, DISTRIBUTED),
    "dp2, distributed, overlap": (2, OVERLAP),
    "dp4": (4, PLAIN),
    "dp4, distributed": (4, DISTRIBUTED),
    "dp4, distributed, overlap": (4, OVERLAP),
}
COMPARED = ("records", "weights", "masters", "moments")


def layouts(
    quick: Iterable[str], more: Mapping[str, tuple[int, dict[str, Any]]] | None = None
) -> Iterator[Any]:
    """Yield pytest parameters: ranks and options of all layouts, marked full except for ``quick`` ones."""
    quick_names = set(quick)
    for name, layout in {**LAYOUTS, **(more or {})}.items():
        yield pytest.param(*layout, id=name, marks=[] if name in quick_names else pytest.mark.full)


def assert_same_training(
    pool: Any, ranks: int, switches: Mapping[str, Any], base: Mapping[str, Any] = OFF, **options: Any
) -> list[dict[str, Any]]:
    """Compare ten steps with ``base`` and ``switches``, bit by bit; return the runs with ``switches``."""
    off = pool.baseline(f"{JOB}:train", ranks, switches=base, **options)
    on = pool.run(f"{JOB}:train", ranks, switches=switches, **options)
    for without, having in zip(off, on, strict=True):
        for what in COMPARED:
            assert having[what] == without[what], what
        assert having["placed"] != without["placed"], "on in one of them"
    return list(on)


def assert_skipped(run: Mapping[str, Any], skip: int) -> None:
    """Check that all steps except one were successful, and clipped."""
    successful = [record["successful"] for record in run["records"]]
    assert successful == [number != skip for number in range(len(successful))]
    assert all(record["norm"] is None or record["norm"] > 0.5 for record in run["records"]), "clipped"
    assert len(run["moments"]) == 2 * len(run["masters"])


LARGER = {
    "overrides": {"hidden_size": 128, "ffn_hidden_size": 512, "moe_ffn_hidden_size": 128},
    # Default bucket size: the padding of many small buckets would blur the figures.
    "ddp_options": {"bucket_size": None},
}
"""A model large enough to count bytes per parameter."""


def saved_at_rest(pool: Any, ranks: int, switches: Mapping[str, Any], **options: Any) -> tuple[float, float]:
    """Return bytes per parameter that the device saves at rest, and that the host adds, over all ranks."""
    off = pool.baseline(f"{JOB}:bytes_at_rest", ranks, switches=OFF, **options, **LARGER)
    on = pool.run(f"{JOB}:bytes_at_rest", ranks, switches=switches, **options, **LARGER)
    count = sum(each["parameters"] for each in on)
    without, having = (sum(each["bytes"] for each in runs) / count for runs in (off, on))
    host = sum(each["host"] for each in on) / count
    print(f"bytes per parameter: {without:.3f} without, {having:.3f} with, {host:.3f} on the host")
    return without - having, host
