"""One place in somebody else's package: what is to happen there, what has happened, and its undoing."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import wrapt

from mindspeed_dsa.patches import compose, hooks
from mindspeed_dsa.patches.errors import PatchDeclarationError
from mindspeed_dsa.patches.spec import Claim, Patch

State = Literal["planned", "pending", "applied", "skipped", "failed", "foreign", "undone"]
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>"})()


def load(dotted: str) -> Any:
    """Import the object that ``"package.module:name"`` stands for."""
    module, _, path = dotted.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@dataclass(eq=False)
class Site:
    """All claims on one target, composed into one object.

    ``original`` is what lay in the owner's dictionary (``ABSENT`` if it was inherited or new),
    ``raw`` what was found there or along the MRO, ``installed`` what the engine put in place.
    """

    claims: list[Claim]
    state: State = "planned"
    reason: str = ""
    owner: Any = None
    original: Any = ABSENT
    raw: Any = None
    installed: Any = None
    rebound: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)

    @property
    def patch(self) -> Patch:
        """Any of the rows; all share target and key."""
        return self.claims[0].patch

    @property
    def label(self) -> str:
        """The target as doctor and messages print it."""
        return self.patch.target if self.patch.key is None else f"{self.patch.target}[{self.patch.key!r}]"

    @property
    def features(self) -> list[str]:
        """Names of the features that ask for this site, innermost first."""
        return list(dict.fromkeys(claim.feature for claim in self.claims))

    @property
    def required(self) -> bool:
        """Whether any feature cannot do without it."""
        return any(claim.patch.required for claim in self.claims)

    @property
    def stale_is_error(self) -> bool:
        """Whether a reference that cannot be rebound fails the run."""
        return any(claim.patch.required and claim.patch.stale == "error" for claim in self.claims)

    def locate(self, module: Any) -> str:
        """Find owner and object; return a problem, or an empty string.

        Looks into dictionaries along the MRO, never through descriptors.
        """
        path = self.patch.path
        try:
            owner, name, raw = wrapt.resolve_path(module, ".".join(path))
        except AttributeError as error:
            return f"{self.label} does not exist ({error})"
        if self.patch.kind == "entry":
            if not isinstance(raw, dict):
                return f"{self.label}: {'.'.join(path)} is a {type(raw).__name__}, not a dictionary"
            self.owner, self.raw = raw, raw.get(self.patch.key, ABSENT)
            self.original = self.raw
            return ""
        self.owner, self.raw = owner, raw
        self.original = vars(owner).get(name, ABSENT)
        return self._missing_parameters()

    def _missing_parameters(self) -> str:
        wanted = {name for claim in self.claims for name in claim.patch.params}
        if not wanted:
            return ""
        try:
            parameters = inspect.signature(compose.underlying(self.raw)).parameters
        except (TypeError, ValueError):
            return ""
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return ""
        missing = sorted(wanted - set(parameters))
        return f"{self.label} has no parameter {', '.join(missing)}" if missing else ""

    def implementation_is_initializing(self) -> bool:
        """Whether an implementation's module is on the import stack right now."""
        modules = (claim.patch.impl.partition(":")[0] for claim in self.claims)
        return any(hooks.is_initializing(sys.modules[name]) for name in modules if name in sys.modules)

    def implementations(self) -> list[Any]:
        """Import what the rows name. Done before any lock is taken: it runs foreign module code."""
        return [load(claim.patch.impl) for claim in self.claims]

    def install(self, implementations: Iterable[Any]) -> None:
        """Compose and set. The site must have been located."""
        replacement = None
        wrappers = []
        for claim, implementation in zip(self.claims, implementations):
            if claim.patch.kind == "wrap":
                wrappers.append((claim.patch.impl, implementation))
            else:
                replacement = implementation
        if self.patch.kind == "entry":
            self.installed = replacement
            self.owner[self.patch.key] = replacement
        else:
            self.installed = (
                replacement
                if self.patch.kind == "value"
                else compose.compose(self.raw, replacement, wrappers)
            )
            setattr(self.owner, self.patch.path[-1], self.installed)
        self.state = "applied"

    def present(self) -> Any:
        """What lies at the site now."""
        if self.patch.kind == "entry":
            return self.owner.get(self.patch.key, ABSENT)
        return vars(self.owner).get(self.patch.path[-1], ABSENT)

    def mark_if_foreign(self) -> None:
        """Notice that somebody has patched over us."""
        if self.state == "applied" and self.present() is not self.installed:
            self.state = "foreign"
            self.reason = f"somebody re-patched it with {self.present()!r} after {', '.join(self.features)}"

    def restore(self) -> None:
        """Put back the very object that was there, unless somebody else has patched over ours."""
        self.mark_if_foreign()
        if self.state == "applied":
            if self.patch.kind == "entry":
                if self.original is ABSENT:
                    del self.owner[self.patch.key]
                else:
                    self.owner[self.patch.key] = self.original
            elif self.original is ABSENT:
                delattr(self.owner, self.patch.path[-1])
            else:
                setattr(self.owner, self.patch.path[-1], self.original)
            self.state, self.reason = "undone", ""


def group(claims: Iterable[Claim]) -> list[Site]:
    """One site per target, wrappers ordered innermost first, a replacement before them.

    Raises:
        PatchDeclarationError: kinds that cannot share a target.
    """
    sites: dict[tuple[str, Any], list[Claim]] = {}
    for claim in claims:
        sites.setdefault((claim.patch.target, claim.patch.key), []).append(claim)
    for (target, _), shared in sites.items():
        shared.sort(key=lambda claim: (claim.patch.kind == "wrap", claim.patch.priority, claim.order))
        kinds = {claim.patch.kind for claim in shared}
        if len(kinds) > 1 and not kinds <= {"replace", "wrap"}:
            names = ", ".join(f"{claim.feature} ({claim.patch.kind})" for claim in shared)
            raise PatchDeclarationError(f"{target}: {names} cannot be combined at one target")
    return [Site(shared) for shared in sites.values()]


def contradictions(site: Site) -> str:
    """Two rows that both want to decide what stands at the site; empty if there are none."""
    deciding = [claim for claim in site.claims if claim.patch.kind != "wrap"]
    if len(deciding) < 2:
        return ""
    first, second = deciding[0], deciding[1]
    return (
        f"{site.label} is replaced by both {first.feature} ({first.patch.impl}) and "
        f"{second.feature} ({second.patch.impl}); switch one of the two off"
    )
