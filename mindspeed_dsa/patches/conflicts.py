"""Rows that concern one target: which ones combine, and which ones conflict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from mindspeed_dsa.patches.site import Site
from mindspeed_dsa.patches.spec import Claim


def group(claims: Iterable[Claim]) -> list[Site]:
    """One site per target: replacements and values first, then wrappers, innermost first."""
    sites: dict[tuple[str, Any], list[Claim]] = {}
    for claim in claims:
        sites.setdefault((claim.patch.target, claim.patch.key), []).append(claim)
    for shared in sites.values():
        shared.sort(key=lambda claim: (claim.patch.kind == "wrap", claim.patch.priority, claim.order))
    return [Site(shared) for shared in sites.values()]


def contradictions(site: Site) -> str:
    """Rows of one site that exclude each other; empty if there are none."""
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
    """The object that a row puts in place; a factory makes another one from another context."""
    return claim.patch.kind, claim.patch.impl, id(claim.context) if claim.patch.factory else None


def places_of(site: Site) -> list[tuple[str, int, Any]]:
    """Identity of the target, which must not be patched under another spelling; the site keeps it alive."""
    claims: list[tuple[str, int, Any]] = [("place", id(site.owner), site.slot)]
    moved = site.moved()
    if moved is not None and isinstance(site.owner, ModuleType):
        claims.append(("object", id(moved[0]), None))
        if site.traceable:
            claims.append(("object", id(moved[1]), None))
    return claims


def clash(site: Site, places: Mapping[Any, Site]) -> str:
    """Two targets that are the same object: the second would silently stack on the first, or miss it."""
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
