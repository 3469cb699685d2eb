"""What the rows of the registry ``layouts.py`` are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.distributed.parity import FP32, STEPS, Bounds, Layout

BESIDE_STOCK = Bounds(
    loss=1e-6, grad_norm=1e-6, first_gradient=1e-6, last_gradient=5e-5, update=5e-4, forced=False
)
"""Beside the same layout in stock's way: the order of a few sums is all that differs."""
# Sums in another order differ by a part in 256, choices flip, and norm weights, which are close to one, are
# stored in steps as large as what five updates move them: only a missing or doubled gradient shows.
ROUNDED = Bounds(loss=5e-3, grad_norm=2e-2, first_gradient=0.25, last_gradient=0.4, update=0.9)
# Each microbatch is computed as in one process and gradients are added up in fp32: only the norm, and with it
# the clipping, is rounded differently, which may move a weight by one of those steps.
STEPPED = Bounds(last_gradient=ROUNDED.last_gradient, update=ROUNDED.update)
# Nothing but the order of sums differs; one sign of an indexer's product near zero may make the last two.
AS_DDP = Bounds(loss=1e-6, grad_norm=1e-6, first_gradient=1e-6, last_gradient=1e-4, update=1e-3)


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        feature: name of a feature or of one of ``layouts.COMBINATIONS``.
        layout: what runs; its name begins with the feature's.
        reference: what it is compared with; by default the same model in one process, without features.
        bounds: largest differences; ``None`` for the same bits.
        steps: of both runs.
        quick: whether ``make test`` runs it.
        watched: events of ``memory_events`` that have to be counted so often, by all ranks together, where a
            feature that causes them is on, and never where none is.
    """

    feature: str
    layout: Layout
    reference: Layout | None
    bounds: Bounds | None
    steps: int
    quick: bool
    watched: Mapping[str, int]


def row(
    feature: str,
    name: str,
    ranks: int = 1,
    flags: str = "",
    model: str = "",
    *,
    own: str = "",
    both: Mapping[str, Any] | None = None,
    reference: Layout | None = None,
    bounds: Bounds | None = FP32,
    steps: int = STEPS,
    quick: bool = False,
    watched: Iterable[str] | Mapping[str, int] = (),
    stock: bool = False,
    cp: int = 0,
    blocks: int = 0,
    **switches: Any,
) -> Row:
    """Return a row.

    Args:
        feature: as in :class:`Row`.
        name: follows the feature's in the layout's name.
        ranks: how many.
        flags: of the job; with ``both`` of the reference, too.
        model: more of them, which make it another model.
        own: flags that the reference does not have.
        both: makes the same layout with these switches alone the reference; the layout has them, too.
        reference: as in :class:`Row`.
        bounds: as in :class:`Row`.
        steps: as in :class:`Row`.
        quick: as in :class:`Row`.
        watched: as in :class:`Row`, or the events alone.
        stock: Megatron's dense GPT in place of the main job's model.
        cp: context parallel ranks. Megatron's flag is read from the command line and from the settings.
        blocks: rows of their blocks.
        **switches: of the layout.
    """
    name = f"{feature}: {name}"
    sizes: dict[str, int] = {}
    for size, flag in ((cp, "--context-parallel-size"), (blocks, "--cp-block-rows")):
        if size:
            flags = f"{flags} {flag} {size}"
            sizes[flag.strip("-").replace("-", "_")] = size
    if both is not None:
        reference = Layout(f"{name}, without", ranks, flags, model, stock, {**both, **sizes})
    layout = Layout(name, ranks, f"{flags} {own}", model, stock, {**(both or {}), **sizes, **switches})
    if not isinstance(watched, Mapping):
        watched = dict.fromkeys(watched, 1)
    return Row(feature, layout, reference, bounds, steps, quick, watched)
