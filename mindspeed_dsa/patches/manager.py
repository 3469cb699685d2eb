"""Patch manager: plan, check, arm, apply, finalize, undo.

No other module of the package sets attributes on foreign objects. Nothing is modified before every check has
passed, and a failure undoes everything.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from mindspeed_dsa import log
from mindspeed_dsa.patches import hooks, stale, versions
from mindspeed_dsa.patches.conflicts import clash, contradictions, group, places_of
from mindspeed_dsa.patches.errors import MindSpeedDSAError, PatchError, shortened
from mindspeed_dsa.patches.site import Covered, Site, SiteReport, State, describe
from mindspeed_dsa.patches.spec import Claim, Patch

_log = log.get()

StaticCheck = Callable[[Patch], tuple[list[str], list[str]]]
"""``patch -> (problems, notes)`` from the target's source, without importing the target."""

_HELD = (
    "the original is still held by {holders}; import mindspeed_dsa.megatron_adaptor before the module "
    "that holds it, or have that holder look the name up when it calls"
)
_NAMED_HOLDERS = 5  # most holders that one error message names


class PatchManager:
    """Plans, applies and undoes the patches of one set of features.

    Args:
        root: top-level package in place of ``megatron`` (``corp_megatron`` in a fork).
        version_of: function from a top-level package to its distribution version, ``None`` if unknown.
        static_check: function that checks a patch against the source of a target that is not imported yet.
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
        # Never held while foreign code runs (imports, decorators): another thread may hold the import
        # lock of the module that this code wants, and wait for ours in its import hook.
        self._lock = threading.RLock()
        self._sites: list[Site] = []
        self._outlived: list[Site] = []  # sites of reloaded modules: the old objects still have users
        self._busy: set[int] = set()  # ids of sites that a thread is preparing
        self._places: dict[Any, Site] = {}  # key of a patched target, see conflicts.places_of(), to its site
        self._armed = False
        self._unhook: list[Callable[[], None]] = []  # functions that disable the import hooks

    # -- plan and check ------------------------------------------------------------------------

    def plan(self, claims: Iterable[Claim]) -> None:
        """Store the claims of all features, without changing anything.

        Raises:
            PatchDeclarationError: a patch's version range cannot be parsed.
            MindSpeedDSAError: the patches of the last plan are armed.
        """
        with self._lock:
            if self._armed:
                raise MindSpeedDSAError("patches are armed already; undo() them before planning again")
            # Other code had patched over these sites before undo(), and may have restored them since.
            self._restore(self._touched())
            inside, outside = [], []
            for claim in claims:
                patch = claim.patch.under_root(self._root)
                rooted = claim if patch is claim.patch else replace(claim, patch=patch)
                reason = versions.outside(rooted.patch, self._version_of)
                if reason:
                    outside.append(Site([rooted], state="skipped", reason=reason))
                else:
                    inside.append(rooted)
            self._sites, self._outlived = [*group(inside), *outside], []

    def check(self) -> None:
        """Run every check that is possible before the first modification.

        Raises:
            PatchError: one or more checks failed: lists every conflict, missing target and missing parameter.
        """
        problems = [text for text in map(contradictions, self._sites) if text]
        places: dict[Any, Site] = {}
        for site in self._in_state("planned"):
            site_problems = self._check_site(site, places)
            if site_problems and site.required:
                problems += [f"{site.who}: {text}" for text in site_problems]
            elif site_problems and hooks.is_loaded(site.patch.module):
                site.state, site.reason = "skipped", "; ".join(site_problems)
            elif site_problems:  # the module may still appear if sys.path grows; the import hook checks again
                site.notes += site_problems
        if problems:
            raise PatchError(problems, "these patches cannot be applied, nothing was changed")

    def _check_site(self, site: Site, places: dict[Any, Site]) -> list[str]:
        problems: list[str] = []
        look = self._static_check or _know_nothing
        for claim in site.claims:
            try:
                claim_problems, notes = look(claim.patch)
            except Exception as error:  # unreadable sources must not prevent the start
                claim_problems, notes = [], [f"its source could not be checked: {error!r}"]
            problems += claim_problems
            site.notes += notes
        if hooks.is_loaded(site.patch.module):
            # The live object takes precedence over its source: other code may have changed it already.
            problem = site.locate() or clash(site, places)
            if not problem:
                places.update(dict.fromkeys(places_of(site), site))
            return [problem] if problem else []
        return list(dict.fromkeys(problems))

    def _in_state(self, *states: State) -> list[Site]:
        return [site for site in self._sites if site.state in states]

    # -- arm and apply -------------------------------------------------------------------------

    def arm(self) -> None:
        """Patch imported modules, and hook the imports of all others.

        Raises:
            PatchError: a required patch of an imported module failed; everything is undone.
        """
        later: dict[str, list[Site]] = {}
        with self._lock:
            self._armed = True
            for site in self._in_state("planned"):
                site.state = "pending"
                if not hooks.is_loaded(site.patch.module):
                    later.setdefault(site.patch.module, []).append(site)
        # Register the hooks first, because implementations import modules that have patches of their own.
        for module, sites in later.items():
            self._unhook.append(hooks.when_imported(module, partial(self._on_import, sites)))
        if self._apply_loaded():
            stale.forget_compiled()
        self._undo_if_failed()

    def _on_import(self, sites: list[Site], module: ModuleType) -> None:
        """Patch a module right after its import. Failures are recorded, because a hook must not raise."""
        try:
            self._apply(sites, since=sites[0].patch.module)
            self._apply_loaded()
        except Exception as error:
            for site in sites:
                self._fail(site, f"it cannot be patched: {error!r}")
        failed = [site for site in sites if site.state == "failed"]
        if failed:
            for site in failed:
                _log.error("%s; the next finalize() raises this", _words(site), ranks="all")

    def _apply_loaded(self) -> bool:
        """Patch modules that were still being imported when :meth:`arm` ran."""
        return self._apply([s for s in self._in_state("pending") if hooks.is_loaded(s.patch.module)])

    def _apply(self, sites: Iterable[Site], since: str | None = None) -> bool:
        """Prepare all sites, then install them and rebind names bound to the originals.

        Returns:
            Whether any site was pending.
        """
        with self._lock:
            mine = [site for site in sites if site.state == "pending" and id(site) not in self._busy]
            self._busy.update(map(id, mine))
        try:
            # Without the lock, because implementations are imported here.
            ready = self._prepare(mine)
            with self._lock:
                # After a failure nothing more is changed: finalize() will reject the whole plan.
                if not self._in_state("failed"):
                    self._install(ready, since)
        finally:
            with self._lock:
                self._busy.difference_update(map(id, mine))
        return bool(mine)

    def _prepare(self, sites: list[Site]) -> list[Site]:
        """Import the implementations and call the decorators of all sites, without modifying a target."""
        implementations: dict[int, list[Any]] = {}
        for site in sites:
            try:
                implementations[id(site)] = site.implementations()
            except Exception as error:
                # The implementation may be importing the target's module right now; _apply_loaded() completes
                # it later. Any other import error is final.
                if not site.awaits_implementation():
                    self._fail(site, f"its implementation cannot be imported: {error!r}")
        located = []
        for site in sites:
            if id(site) in implementations:
                problem = site.locate()
                if problem:
                    self._fail(site, problem)
                else:
                    located.append(site)
        # Base classes first: the patch of an inherited method wraps the patch of the base class's method.
        located.sort(key=lambda site: len(site.owner.__mro__) if isinstance(site.owner, type) else 0)
        composed: dict[Any, Site] = {}
        for site in located:
            try:
                site.inherit(composed)
                site.prepare(implementations[id(site)])
                composed[id(site.owner), site.slot] = site
            except Exception as error:
                self._fail(site, f"it cannot be patched: {error}")
        return [site for site in located if site.state == "pending"]

    def _install(self, sites: list[Site], since: str | None) -> None:
        applied = []
        for site in sites:
            if site.state != "pending":
                continue  # another thread undid it while it was prepared
            problem = clash(site, self._places)
            try:
                if not problem:
                    site.install()
                    self._places.update(dict.fromkeys(places_of(site), site))
                    applied.append(site)
            except Exception as error:
                problem = f"it cannot be patched: {error}"
            if problem:
                self._fail(site, problem)
        self._rebind(applied, since)

    @staticmethod
    def _fail(site: Site, reason: str) -> None:
        site.state, site.reason = ("failed" if site.required else "skipped"), reason

    def _rebind(self, sites: list[Site], since: str | None = None) -> None:
        """Rebind module-level names from originals to patches."""
        movable = {id(moved[0]): (site, moved) for site in sites if (moved := site.moved())}
        originals = {key: moved[0] for key, (_, moved) in movable.items()}
        for names, name, value in hooks.bound_names(originals, since) if originals else ():
            site, (_, patch) = movable[id(value)]
            names[name] = patch
            site.rebound.append((names, name))

    # -- finalize ------------------------------------------------------------------------------

    def finalize(self, thorough: bool = False) -> None:
        """Verify that every patch is installed and reached by calls. Call it right before building the model.

        Args:
            thorough: whether to search for references to originals also at sites with ``stale="report"``. The
                search traverses the whole heap, and a training run does not need it.

        Raises:
            PatchError: a required site failed, or its original is still held elsewhere. One message lists
                all; everything is undone before it is raised.
        """
        self._renew()
        if self._apply_loaded():
            stale.forget_compiled()
        for site in self._in_state("pending"):
            if hooks.cannot_be_imported(site.patch.module):
                self._fail(site, f"there is no module {site.patch.module}")
        with self._lock:
            self._refresh()
            refused = [(site, site.reason) for site in self._in_state("foreign") if site.lost]
            applied = self._in_state("applied")
            # Modules that were imported since then may have bound the originals to their own names.
            self._rebind(applied)
            holding = [*self._sites, *self._outlived, *stale.holding_on_purpose(self._touched())]
            stale.note_holders([site for site in applied if thorough or not site.stale_is_harmless], holding)
            held = [site for site in applied if site.stale and site.stale_is_error]
            if held and gc.collect():  # collect first: a holder that is garbage is not an error
                stale.note_holders(held, holding)
            refused += [
                (site, _HELD.format(holders=shortened(site.stale, _NAMED_HOLDERS)))
                for site in held
                if site.stale
            ]
        refused = [(site, reason) for site, reason in refused if site.required]
        if refused:
            self.undo()
        for site, reason in refused:
            self._fail(site, reason)
        self._undo_if_failed()

    def _renew(self) -> None:
        """Set the state of sites back to pending if calls of the target no longer reach the patch.

        A reloaded module gets a new site. The old site stays patched until undo, because the old module's
        objects may still be in use. The patch of an inherited method is composed again if its base class has
        changed.
        """
        with self._lock:
            self._refresh()
            for index, site in enumerate(self._sites):
                if site.state == "foreign" and site.executed_again():
                    self._outlived.append(site)
                elif site.state == "applied" and site.base_has_changed():
                    self._restore([site])
                else:
                    continue
                self._sites[index] = Site(site.claims, state="pending", notes=site.notes)
                self._places = {place: other for place, other in self._places.items() if other is not site}

    def _refresh(self) -> None:
        for site in self._sites:
            site.refresh()

    def _undo_if_failed(self) -> None:
        problems = [_words(site) for site in self._in_state("failed")]
        if problems:
            self.undo()
            raise PatchError(problems, "required patches failed, all patches were undone")

    # -- undo and report -----------------------------------------------------------------------

    def undo(self) -> None:
        """Put the original objects back everywhere, except where other code has replaced our patch.

        A second call also restores sites at which other code has put our patch back since.
        """
        with self._lock:
            self._armed = False
            self._places = {}
            for forget in self._unhook:
                forget()
            self._unhook.clear()
            touched = self._touched()
            self._restore(touched)
            for site in self._in_state("planned", "pending"):
                site.state, site.reason = "undone", ""
        if touched:
            stale.forget_compiled()

    def _touched(self) -> list[Site]:
        return [s for s in (*self._outlived, *self._sites) if s.state in ("applied", "foreign")]

    def _restore(self, sites: list[Site]) -> None:
        # Last installed first: the patch of an inherited method wraps the patch of its base class.
        for site in reversed(sites):
            try:
                site.restore()
            except Exception as error:
                site.state, site.reason = "failed", f"the original cannot be put back: {error}"
        stale.rebind_back(sites)
        for site in sites:
            if site.state == "undone":
                site.release()

    def covered(self) -> list[Covered]:
        """Return the other libraries' objects below or above our patches, see :class:`Covered`."""
        with self._lock:
            self._refresh()
            replaced = [
                Covered(site.label, site.raw, all(claim.patch.kind == "wrap" for claim in site.claims))
                for site in self._in_state("applied", "foreign")
            ]
            return replaced + [Covered(site.label, site.live(), True) for site in self._in_state("foreign")]

    def report(self) -> list[SiteReport]:
        """Return the state of every site, including sites that other code patched over."""
        with self._lock:
            self._refresh()
            stale.note_left(self._sites)
            return [describe(site) for site in self._sites]


def _know_nothing(patch: Patch) -> tuple[list[str], list[str]]:
    return [], []


def _words(site: Site) -> str:
    return f"{site.who}: {site.label}: {site.reason}"
