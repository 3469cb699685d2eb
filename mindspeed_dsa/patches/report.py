"""State of every site, as rows for doctor, the startup table and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_dsa.patches.site import Site


@dataclass(frozen=True)
class SiteReport:
    """One patch site, in words."""

    target: str
    kind: str
    features: list[str]
    stack: list[str]
    """Implementations, outermost first."""
    state: str
    reason: str
    required: bool
    rebound: int
    """Names in other modules that were bound to the original and now are bound to the patch."""
    stale: list[str]
    """Holders of the original that cannot be rebound; of an undone site, holders of the patch."""
    notes: list[str]
    """Drift that does not stop the site: a function that the fork changed."""
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def describe(site: Site) -> SiteReport:
    """The report of one site."""
    return SiteReport(
        target=site.label,
        kind="+".join(dict.fromkeys(claim.patch.kind for claim in site.claims)),
        features=site.features,
        stack=site.stack[::-1] or list(dict.fromkeys(claim.patch.impl for claim in reversed(site.claims))),
        state=site.state,
        reason=site.reason,
        required=site.required,
        rebound=len(site.rebound),
        stale=list(site.stale),
        notes=list(site.notes),
        why="; ".join(dict.fromkeys(claim.patch.why for claim in site.claims)),
    )
