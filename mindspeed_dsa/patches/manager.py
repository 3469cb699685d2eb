"""The patch manager: plan, check, arm, apply, finalize, undo.

The only place that sets attributes on foreign objects. Nothing is mutated before every check has
passed; what cannot be kept is undone as a whole.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.patches import compose, hooks, references
from mindspeed_dsa.patches.errors import MindSpeedDSAError, PatchError
from mindspeed_dsa.patches.report import SiteReport, describe
from mindspeed_dsa.patches.site import Site, contradictions, group
from mindspeed_dsa.patches.spec import Claim, Patch

StaticCheck = Callable[[Patch], tuple[list[str], list[str]]]
"""``patch -> (problems, notes)`` from the source of the target, without importing it."""

_HELD = (
    "the original is still held by {holders}; import mindspeed_dsa.megatron_adaptor before the module "
    "that holds it, or have that holder look the name up when it calls"
)


class PatchManager:
    """Owns the patch sites of one set of features.

    Args:
        root: top-level package that stands for ``megatron`` (``corp_megatron`` in a fork).
        version_of: distribution version of a top-level package, ``None`` if unknown.
        static_check: looks at the source of a target that is not imported yet, and compares it with
            what is known of the release.
    """

    def __init__(
        self,
        *,
        root: str = "megatron",
        version_of: Callable[[str], str | None] = lambda package: None,
        static_check: StaticCheck | None = None,
    ) -> None:
        self._root = root
        self._version_of = version_of
        self._static_check = static_check
        self._lock = threading.RLock()
        self._sites: list[Site] = []
        self._notes: dict[int, list[str]] = {}
        self._patched_objects: dict[int, Site] = {}  # originals and patches by id; the sites keep them alive
        self._generation = 0  # import hooks cannot be unregistered; old ones see that they are old

    # -- plan and check ------------------------------------------------------------------------

    def plan(self, claims: Iterable[Claim]) -> None:
        """Take the claims of all features; nothing is touched."""
        if any(site.state in ("pending", "applied") for site in self._sites):
            raise MindSpeedDSAError("patches are armed already; undo() them before planning anew")
        rooted = [Claim(c.feature, c.patch.under_root(self._root), c.order) for c in claims]
        inside = []
        outside = []
        for claim in rooted:
            reason = self._out_of_range(claim.patch)
            if reason:
                outside.append(Site([claim], state="skipped", reason=reason))
            else:
                inside.append(claim)
        self._sites = [*group(inside), *outside]
        self._notes = {}
        self._patched_objects = {}

    def check(self) -> None:
        """Everything that can be known before the first mutation.

        Raises:
            PatchError: lists every contradiction, missing target and missing parameter at once.
        """
        problems = [text for text in map(contradictions, self._sites) if text]
        for site in self._planned():
            found = self._check_site(site)
            if not found:
                continue
            if site.required:
                problems += [f"{', '.join(site.features)}: {text}" for text in found]
            else:
                site.state, site.reason = "skipped", "; ".join(found)
        if problems:
            raise PatchError(problems, "these patches cannot be applied, nothing was changed")

    def _check_site(self, site: Site) -> list[str]:
        problems: list[str] = []
        if self._static_check is not None:
            for claim in site.claims:
                found, notes = self._static_check(claim.patch)
                problems += found
                self._notes.setdefault(id(site), []).extend(notes)
        if hooks.is_loaded(site.patch.module):
            # The object that is there outranks its source: somebody may have changed it already.
            problem = site.locate(sys.modules[site.patch.module])
            return [problem] if problem else []
        return list(dict.fromkeys(problems))

    def _out_of_range(self, patch: Patch) -> str:
        if not patch.versions:
            return ""
        package = patch.module.partition(".")[0]
        version = self._version_of(package)
        if version is None or SpecifierSet(patch.versions).contains(version, prereleases=True):
            return ""
        return f"{package} {version} is outside {patch.versions}"

    def _planned(self) -> list[Site]:
        return [site for site in self._sites if site.state == "planned"]

    # -- arm and apply -------------------------------------------------------------------------

    def arm(self) -> None:
        """Patch what is imported, and hook the imports of the rest.

        Raises:
            PatchError: a required site of an imported module failed; everything is undone.
        """
        present: list[Site] = []
        later: dict[str, list[Site]] = {}
        with self._lock:
            self._generation += 1
            for site in self._planned():
                if hooks.is_loaded(site.patch.module):
                    present.append(site)
                else:
                    site.state = "pending"
                    later.setdefault(site.patch.module, []).append(site)
        self._apply(present)
        self._undo_if_failed()
        for module, sites in later.items():
            # A module in the middle of its own execution cannot be hooked any more; its sites stay
            # pending until the next hook fires or finalize() comes.
            if module not in sys.modules:
                hooks.when_imported(module, partial(self._on_import, self._generation, sites))

    def _on_import(self, generation: int, sites: list[Site], module: ModuleType) -> None:
        """Import hook; records failures, never raises."""
        if generation != self._generation:
            return
        self._apply(sites, since=module.__name__)
        self._apply_overdue()

    def _apply_overdue(self) -> None:
        """Sites of modules that were being executed when we armed and are complete by now."""
        self._apply([s for s in self._sites if s.state == "pending" and hooks.is_loaded(s.patch.module)])

    def _apply(self, sites: list[Site], since: str | None = None) -> None:
        """Install the sites, then rebind every module-level name that still is an original."""
        # Implementations are imported outside the lock: importing takes the interpreter's module
        # locks, and another thread may hold one of those while it waits for ours.
        ready: list[tuple[Site, list[Any]]] = []
        for site in sites:
            if site.implementation_is_initializing():
                # An implementation imports Megatron, which fires our hook, which wants that very
                # implementation: the hook that began it all will find this site overdue.
                site.state = "pending"
                continue
            try:
                ready.append((site, site.implementations()))
            except Exception as error:
                self._fail(site, f"its implementation cannot be imported: {error!r}")
        with self._lock:
            applied = []
            for site, implementations in ready:
                if site.state not in ("planned", "pending"):
                    continue  # another thread was faster
                try:
                    problem = site.locate(sys.modules[site.patch.module]) or self._known_object(site)
                    if problem:
                        self._fail(site, problem)
                        continue
                    site.install(implementations)
                    applied.append(site)
                    if _is_composed(site):
                        self._patched_objects |= {id(site.raw): site, id(site.installed): site}
                except Exception as error:
                    self._fail(site, f"it cannot be patched: {error!r}")
            self._rebind(applied, since)

    def _known_object(self, site: Site) -> str:
        """Two targets that are one object: the second would stack on the first, or miss it, unseen."""
        other = self._patched_objects.get(id(site.raw)) if _is_composed(site) else None
        if other is None or other.state != "applied":
            return ""
        if isinstance(site.owner, type) and isinstance(other.owner, type):
            return ""  # inherited from a class that is patched as well: stacking is meant
        return f"it is the same object as {other.label}, which is patched; name only one of them"

    @staticmethod
    def _fail(site: Site, reason: str) -> None:
        site.state, site.reason = ("failed" if site.required else "skipped"), reason

    def _rebind(self, sites: list[Site], since: str | None = None) -> None:
        movable = {id(site.raw): site for site in sites if _is_movable(site)}
        originals = {key: site.raw for key, site in movable.items()}
        if not originals:
            return
        for names, name, value in hooks.holders(originals, since):
            site = movable[id(value)]
            names[name] = site.installed
            site.rebound.append((names, name))

    # -- finalize ------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Verify every site; to be called right before the model is built.

        Raises:
            PatchError: one message for all failed required sites and all stale references to
                required ones; everything is undone before it is raised.
        """
        self._apply_overdue()
        with self._lock:
            applied = [site for site in self._sites if site.state == "applied"]
            self._rebind(applied)
            self._find_stale(applied)
            for site in applied:
                site.mark_if_foreign()
            held = [site for site in applied if site.stale and site.stale_is_error]
            if held:
                self.undo()
            for site in held:
                self._fail(site, _HELD.format(holders=", ".join(site.stale)))
        self._undo_if_failed()

    def _find_stale(self, applied: list[Site]) -> None:
        callables = [site for site in applied if _may_be_held(site)]
        by_original = {id(compose.underlying(site.raw)): site for site in callables}
        own: list[Any] = [*applied, *(vars(site) for site in applied), *(site.raw for site in applied)]
        for site in applied:
            own += references.closure_cells(compose.underlying(site.installed))
            site.stale = []
        own += [callables, applied, by_original]
        for reference in references.find((compose.underlying(site.raw) for site in callables), own):
            by_original[id(reference.original)].stale.append(reference.holder)

    def _undo_if_failed(self) -> None:
        problems = [
            f"{', '.join(site.features)}: {site.label}: {site.reason}"
            for site in self._sites
            if site.state == "failed"
        ]
        if problems:
            self.undo()
            raise PatchError(problems, "required patches failed, all patches were undone")

    # -- undo and report -----------------------------------------------------------------------

    def undo(self) -> None:
        """Restore the identical objects everywhere; foreign re-patches are left alone."""
        with self._lock:
            self._generation += 1
            touched = [site for site in self._sites if site.installed is not None]
            for site in reversed(touched):
                site.restore()
            # Names bound since the patch was applied hold the patch; those from before were rebound.
            ours = {id(site.installed): site for site in touched if _is_movable(site) and _is_composed(site)}
            patched = {key: site.installed for key, site in ours.items()}
            for names, name, value in hooks.holders(patched) if patched else ():
                names[name] = ours[id(value)].raw
            for site in touched:
                for names, name in site.rebound:
                    if names.get(name) is site.installed:  # a module that left sys.modules
                        names[name] = site.raw
                site.rebound = []
            for site in self._sites:
                if site.state in ("planned", "pending"):
                    site.state, site.reason = "undone", ""

    def report(self) -> list[SiteReport]:
        """The state of every site, foreign re-patches noticed."""
        with self._lock:
            for site in self._sites:
                site.mark_if_foreign()
            return [describe(site, self._notes.get(id(site), [])) for site in self._sites]


def _may_be_held(site: Site) -> bool:
    """Whether a stale reference to the original means anything: functions and classes, not constants."""
    return callable(compose.underlying(site.raw)) and site.patch.kind != "entry"


def _is_composed(site: Site) -> bool:
    """Whether what is installed was made for this site alone; a ``value`` may have other owners."""
    return site.patch.kind in ("replace", "wrap")


def _is_movable(site: Site) -> bool:
    """Whether other modules' names for the original may be rebound by identity.

    Module-level functions and classes only: constants such as ``None`` or ``True`` are shared by
    everybody, and methods are patched where they live.
    """
    module_level = isinstance(site.owner, ModuleType) and site.patch.kind != "entry"
    return module_level and callable(site.raw)
