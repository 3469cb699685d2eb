"""Names in any module that are bound to a patch, given their originals again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.patches import hooks, references
from mindspeed_dsa.patches.site import Site


def back(sites: Sequence[Site]) -> None:
    """Names that were rebound to the patches of undone sites, and names bound to them since."""
    behind = _recorded(sites)
    # An object that does not name its site came from there only if it is bound to the target's name.
    bound = [*hooks.bound_as([(site.slot, _patch(site)) for site in sites if not site.traceable])]
    if since := {id(patch): patch for patch in _held_elsewhere(sites)}:
        bound += hooks.bound_names(since)
    for names, name, value in bound:
        while known := [original for site, original in behind[id(value)] if site.can_be_told_by(name)]:
            names[name] = value = known[0]
            if id(value) not in behind:  # else a patch on top of the patch of a base class
                break


def _recorded(sites: Sequence[Site]) -> dict[int, list[tuple[Site, Any]]]:
    """Rebind the names that were recorded when the patches were installed.

    Returns:
        By ``id`` of a patch, the sites that have installed it and what was there.
    """
    behind: dict[int, list[tuple[Site, Any]]] = {}
    for site in sites:
        if (linked := site.linked()) is None:
            continue
        original, patch = linked
        behind.setdefault(id(patch), []).append((site, original))
        for names, name in site.rebound:
            if names.get(name) is patch:
                names[name] = original
    return behind


def _held_elsewhere(sites: Sequence[Site]) -> list[Any]:
    """Patches that something beside their sites holds: no other is bound to a name."""
    traceable = list({id(patch): patch for patch in (_patch(s) for s in sites if s.traceable)}.values())
    patches = [patch for patch in traceable if patch is not None]
    traceable.clear()  # what a variable holds would count
    functions = {*map(id, patches)}
    methods = {id(site.installed): site.installed for site in sites if id(site.installed) not in functions}
    return references.held_by_others(patches, [*sites, *methods.values(), patches])


def _patch(site: Site) -> Any:
    linked = site.linked()
    return None if linked is None else linked[1]
