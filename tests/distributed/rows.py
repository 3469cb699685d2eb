"""Row type of the registry in ``layouts.py``, its default bounds, and a constructor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.distributed.parity import FP32, STEPS, Bounds, Layout

BESIDE_STOCK = Bounds(
    loss=1e-6, grad_norm=1e-6, first_gradient=1e-6, last_gradient=5e-5, update=5e-4, forced=False
)
"""Bounds against the same layout without the feature: only the order of a few sums differs."""
# For bf16. Sums in another order differ by 1/256 and choices flip. Norm weights are close to one, where a
# bf16 step is as large as five updates. Only a missing or doubled gradient shows.
ROUNDED = Bounds(loss=5e-3, grad_norm=2e-2, first_gradient=0.25, last_gradient=0.4, update=0.9)
# Microbatches are computed as in one process, and gradients are summed in fp32. Only the global norm is
# rounded differently. Through clipping it may move a weight by one bf16 step.
STEPPED = Bounds(last_gradient=ROUNDED.last_gradient, update=ROUNDED.update)
# Only the order of sums differs. One flipped sign near zero in the indexer can reach the last two bounds.
AS_DDP = Bounds(loss=1e-6, grad_norm=1e-6, first_gradient=1e-6, last_gradient=1e-4, update=1e-3)


@dataclass(frozen=True)
class Row:
    """One comparison of the registry.

    Attributes:
        feature: name of a feature, or of one of ``layouts.COMBINATIONS``.
        layout: configuration under test; its name begins with the feature's.
        reference: expected configuration; ``None`` for the same model in one process, without features.
        bounds: largest differences; ``None`` for bit-identical results.
        steps: number of steps of both runs.
        quick: whether ``make test`` runs the row.
        watched: minimum count per event of ``memory_events``, summed over the ranks. It applies where a
            feature causes the event; elsewhere the count must be zero.
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
    """Build a row.

    Args:
        feature: feature of the row, as in :class:`Row`.
        name: suffix of the layout's name, after the feature's.
        ranks: number of ranks.
        flags: command-line flags of the job; with ``both``, of the reference, too.
        model: model flags of both sides.
        own: flags of the layout only, not of its reference.
        both: switches of both sides. The reference is then the same layout with only these switches.
        reference: reference layout, as in :class:`Row`.
        bounds: largest differences, as in :class:`Row`.
        steps: number of steps, as in :class:`Row`.
        quick: whether ``make test`` runs the row.
        watched: minimum counts as in :class:`Row`, or events with a minimum of 1.
        stock: whether the model is Megatron's dense GPT instead of the main job's.
        cp: context parallel size, passed as Megatron's flag and as a switch; 0 leaves both out.
        blocks: block size of context parallelism in tokens; 0 leaves it out.
        **switches: feature switches of the layout.
    """
    name = f"{feature}: {name}"
    sizes: dict[str, int] = {}
    for size, flag in ((cp, "--context-parallel-size"), (blocks, "--cp-block-rows")):
        if size:
            flags = f"{flags} {flag} {size}"
            sizes[flag.strip("-").replace("-", "_")] = size
    # The reference has the same layout, so that only the feature differs.
    if both is not None:
        reference = Layout(f"{name}, without", ranks, flags, model, stock, {**both, **sizes})
    layout = Layout(name, ranks, f"{flags} {own}", model, stock, {**(both or {}), **sizes, **switches})
    if not isinstance(watched, Mapping):
        watched = dict.fromkeys(watched, 1)
    return Row(feature, layout, reference, bounds, steps, quick, watched)
