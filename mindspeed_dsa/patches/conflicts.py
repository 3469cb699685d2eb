"""Grouping of patches by target, and detection of patches that conflict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from mindspeed_dsa.patches.site import Site
from mindspeed_dsa.patches.spec import Claim


def group(claims: Iterable[Claim]) -> list[Site]:
    """Group claims into one site per target. Replacements come first, then wrappers from inside out."""
    sites: dict[tuple[str, Any], list[Claim]] = {}
    for claim in claims:
        sites.setdefault((claim.patch.target, claim.patch.key), []).append(claim)
    for shared in sites.values():
        # False sorts before True: replacements and values, then wrappers by priority and feature order.
        shared.sort(key=lambda claim: (claim.patch.kind == "wrap", claim.patch.priority, claim.order))
    return [Site(shared) for shared in sites.values()]


def contradictions(site: Site) -> str:
    """Describe a conflict between claims of one site, such as two replacements; empty if none."""
    deciding = [claim for claim in site.claims if claim.patch.kind != "wrap"]
    if not deciding:
        return ""
    first = deciding[0]
    second = next((claim for claim in deciding if _decision(claim) != _decision(first)), None)
    if second is not None:
        return (
            f"{site.label} is replaced by both {first.who} ({first.patch.impl}) and "
            f"{second.who} ({second.patch.impl}); switch one of the two off"
        )
    wrapping = [claim.who for claim in site.claims if claim.patch.kind == "wrap"]
    if wrapping and first.patch.kind != "replace":
        return (
            f"{site.label} is wrapped by {', '.join(wrapping)} and set as a {first.patch.kind} by "
            f"{first.who}; switch one of the two off, or declare the {first.patch.kind} as a replacement"
        )
    return ""


def _decision(claim: Claim) -> Any:
    """Return a key that is equal for claims that install the same object. A factory has one per context."""
    return claim.patch.kind, claim.patch.impl, id(claim.context) if claim.patch.factory else None


def places_of(site: Site) -> list[tuple[str, int, Any]]:
    """Return keys for the site's target and object, with which :func:`clash` finds a second patch."""
    # The keys contain ids, which stay valid because the site keeps the objects alive.
    claims: list[tuple[str, int, Any]] = [("place", id(site.owner), site.slot)]
    moved = site.moved()
    if moved is not None and isinstance(site.owner, ModuleType):
        claims.append(("object", id(moved[0]), None))
        # Another target may be a name that already holds this patch.
        if site.traceable:
            claims.append(("object", id(moved[1]), None))
    return claims


def clash(site: Site, places: Mapping[Any, Site]) -> str:
    """Return a message if another site already patches the same object, else an empty string.

    Args:
        site: site to check.
        places: dict from key (see :func:`places_of`) to the site that has it.
    """
    # Otherwise the second patch would silently stack on the first, or never be reached.
    wanted = [("place", id(site.owner), site.slot)]
    if isinstance(site.owner, ModuleType) and site.moved() is not None:
        wanted.append(("object", id(site.raw), None))
    other = next((places[place] for place in wanted if place in places), None)
    if other is None:
        return ""
    return (
        f"it is the same object as {other.label}, which {other.who} patches; "
        "both rows must use the same name for it"
    )
