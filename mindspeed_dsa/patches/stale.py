"""References that patching and undoing leave behind, and compiled code that uses them.

A reference to an original in a container or a closure can only be reported, not replaced. Module-level names
that are bound to a patch are bound to the original again on undo. ``torch.compile`` guards the globals that
compiled code uses, but not the methods of classes. Measured on torch 2.13: a compiled module keeps running
the original method after the class is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.patches import compose, holders, hooks
from mindspeed_dsa.patches.site import Site


def note_holders(applied: Sequence[Site], own: Sequence[Any]) -> None:
    """Record in each site the objects that still hold its original and cannot be rebound.

    Args:
        applied: sites to search for.
        own: engine objects that hold originals on purpose.
    """
    sites: dict[int, list[Site]] = {}
    for site in applied:
        site.stale = []
        sites.setdefault(_id_of_moved(site), []).append(site)
    originals = [moved[0] for moved in map(Site.moved, applied) if moved is not None]
    for reference in holders.find(originals, own):
        for site in sites[id(reference.original)]:
            site.stale.append(reference.holder)


def note_left(sites: Sequence[Site]) -> None:
    """Record in each undone site the objects that still hold its patch."""
    undone = {id(site.left()): site for site in sites if site.state == "undone" and site.left is not None}
    undone.pop(id(None), None)
    for site in undone.values():
        site.stale = []
    patches = [site.left() for site in undone.values() if site.left is not None]
    for reference in holders.find(patches, ()):
        undone[id(reference.original)].stale.append(reference.holder)


def holding_on_purpose(sites: Sequence[Site]) -> list[Any]:
    """List the engine's own objects that hold originals, because they call or restore them."""
    holding: list[Any] = []
    for site in sites:
        function = compose.underlying(site.raw)
        holding += compose.parts(site.installed, function)
        if function is not site.raw:
            holding.append(site.raw)
    return holding


def _id_of_moved(site: Site) -> int:
    moved = site.moved()
    return id(None if moved is None else moved[0])


def rebind_back(sites: Sequence[Site]) -> None:
    """Rebind module-level names from the patches of undone sites to the originals."""
    behind = _recorded(sites)
    # An object that is not unique to its site came from there only if it is bound to the target's name.
    bound = [*hooks.bound_as([(site.slot, _patch(site)) for site in sites if not site.traceable])]
    if since := {id(patch): patch for patch in _held_elsewhere(sites)}:
        bound += hooks.bound_names(since)
    for names, name, value in bound:
        while originals := [original for site, original in behind[id(value)] if site.can_be_told_by(name)]:
            names[name] = value = originals[0]
            if id(value) not in behind:  # else the original is itself the patch of a base class
                break


def _recorded(sites: Sequence[Site]) -> dict[int, list[tuple[Site, Any]]]:
    """Rebind the names recorded at installation from the patches to the originals.

    Returns:
        Mapping from the ``id`` of a patch to the sites that installed it, with their originals.
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
    """List the patches that have references from outside of the engine, perhaps from module-level names."""
    traceable = list({id(patch): patch for patch in (_patch(s) for s in sites if s.traceable)}.values())
    patches = [patch for patch in traceable if patch is not None]
    traceable.clear()  # references from this list would count as foreign
    # A method's descriptor also holds its function, so count it among the engine's own objects.
    functions = {*map(id, patches)}
    methods = {id(site.installed): site.installed for site in sites if id(site.installed) not in functions}
    return holders.held_by_others(patches, [*sites, *methods.values(), patches])


def _patch(site: Site) -> Any:
    linked = site.linked()
    return None if linked is None else linked[1]


def forget_compiled() -> None:
    """Call ``torch._dynamo.reset`` if torch compiled any code, so that torch recompiles it with the patches.

    Waits for a compilation in progress, so the caller must hold no lock.
    """
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    # If the count of compiled frames cannot be read, assume that there are some.
    if convert_frame is not None and getattr(convert_frame, "FRAME_COUNTER", True):
        reset = getattr(sys.modules.get("torch._dynamo"), "reset", None)
        if reset is not None:
            reset()
