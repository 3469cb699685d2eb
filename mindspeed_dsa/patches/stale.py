"""Stale references: holders of originals after patching, holders of patches after undo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.patches import compose, references
from mindspeed_dsa.patches.site import Site


def note_holders(applied: Sequence[Site], own: Sequence[Any]) -> None:
    """Record in each site the holders of its original that no assignment can reach.

    Args:
        applied: sites to search for.
        own: objects of the engine that hold originals on purpose.
    """
    sites: dict[int, list[Site]] = {}
    for site in applied:
        site.stale = []
        sites.setdefault(_id_of_moved(site), []).append(site)
    originals = [moved[0] for moved in map(Site.moved, applied) if moved is not None]
    for reference in references.find(originals, own):
        for site in sites[id(reference.original)]:
            site.stale.append(reference.holder)


def note_left(sites: Sequence[Site]) -> None:
    """Record in each undone site the remaining holders of its patch."""
    undone = {id(site.left()): site for site in sites if site.state == "undone" and site.left is not None}
    undone.pop(id(None), None)
    for site in undone.values():
        site.stale = []
    patches = [site.left() for site in undone.values() if site.left is not None]
    for reference in references.find(patches, ()):
        undone[id(reference.original)].stale.append(reference.holder)


def holding_on_purpose(sites: Sequence[Site]) -> list[Any]:
    """Objects of the patches themselves that hold originals, in order to call or restore them."""
    found: list[Any] = []
    for site in sites:
        function = compose.underlying(site.raw)
        found += compose.parts(site.installed, function)
        if function is not site.raw:
            found.append(site.raw)
    return found


def _id_of_moved(site: Site) -> int:
    moved = site.moved()
    return id(None if moved is None else moved[0])
