"""One patched attribute of a third-party package: how it is found, patched, checked and restored."""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

from mindspeed_dsa.patches import compose, holders, hooks, reach, signatures
from mindspeed_dsa.patches.errors import PatchDeclarationError
from mindspeed_dsa.patches.signatures import is_a
from mindspeed_dsa.patches.spec import Claim, Patch

State = Literal["planned", "pending", "applied", "skipped", "failed", "foreign", "undone"]
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>"})()
"""Marker for an attribute that the owner's own dictionary does not have."""


def load(dotted: str) -> Any:
    """Import an object by its path ``"package.module:name"``."""
    module, _, path = dotted.partition(":")
    target: Any = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    return target


@dataclass(eq=False, slots=True)
class Site:
    """One patch target, the patches that all features declare for it, and the object composed from these.

    Attributes:
        owner: module, class or dictionary that holds the target.
        original: value in the owner's own dictionary; ``ABSENT`` if inherited or new.
        raw: original value in the dictionary of the owner or of a base class, without unwrapping descriptors.
        installed: object that the engine installed, or will install.
        execution: identity of the module execution that was patched, see ``hooks.execution``.
        rebound: names in other modules (``from x import y``) that were rebound from the original to the
            patch.
        stale: objects that still hold the original (after undo: the patch) and cannot be rebound, for example
            closures.
        stack: names of the composed implementations, innermost first.
        left: weak reference to the undone patch, to find other code that still holds it.
    """

    claims: list[Claim]
    state: State = "planned"
    reason: str = ""
    owner: Any = None
    original: Any = ABSENT
    raw: Any = ABSENT
    installed: Any = ABSENT
    execution: Any = None
    rebound: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    left: weakref.ref[Any] | None = None

    @property
    def patch(self) -> Patch:
        """First patch of the site. All patches of a site have the same target and key."""
        return self.claims[0].patch

    @property
    def label(self) -> str:
        """The target as doctor and messages print it."""
        return self.patch.label

    @property
    def slot(self) -> Any:
        """Attribute name or dictionary key of the target in its owner."""
        return self.patch.path[-1] if self.patch.kind != "entry" else self.patch.key

    @property
    def features(self) -> list[str]:
        """Names of the features that claim this site, innermost first."""
        return list(dict.fromkeys(claim.feature for claim in self.claims))

    @property
    def who(self) -> str:
        """Comma-separated names of the features that claim this site, for messages."""
        return ", ".join(dict.fromkeys(claim.who for claim in self.claims))

    @property
    def required(self) -> bool:
        """Return whether any feature requires the patch."""
        return any(claim.patch.required for claim in self.claims)

    @property
    def stale_is_error(self) -> bool:
        """Return whether a reference to the original that cannot be rebound is an error."""
        return any(claim.patch.required and claim.patch.stale == "error" for claim in self.claims)

    @property
    def stale_is_harmless(self) -> bool:
        """Return whether every patch of the site declares ``stale="report"``."""
        return all(claim.patch.stale == "report" for claim in self.claims)

    @property
    def composed(self) -> bool:
        """Return whether the site installs a function composed of replacements and decorators."""
        return self.patch.kind in ("replace", "wrap")

    @property
    def traceable(self) -> bool:
        """Return whether the installed object is unique to this site, so that its identity finds the site."""
        return self.composed or (self.patch.kind == "value" and is_a(self.installed, FunctionType))

    # -- before --------------------------------------------------------------------------------

    def locate(self) -> str:
        """Find the target and its owner in the imported module.

        The search reads the dictionaries of the classes along the MRO, so no descriptor is called.

        Returns:
            Description of the problem, or an empty string.
        """
        try:
            return self._find()
        except Exception as error:  # a module's own __getattr__ may raise any exception
            return f"{self.label} does not exist ({error})"

    def _find(self) -> str:
        owner, name, raw = self._resolve()
        self.execution = hooks.execution(self.patch.module)
        if self.patch.kind == "entry":
            if not isinstance(raw, dict):
                return f"{self.label} does not exist: its owner is a {type(raw).__name__}, not a dictionary"
            self.owner, self.raw = raw, raw.get(self.patch.key, ABSENT)
            self.original = self.raw
            return ""
        self.owner, self.raw = owner, raw
        if not hasattr(owner, "__dict__"):
            return f"{self.label} is in a {type(owner).__name__}, which has no dictionary to hold a patch"
        self.original = vars(owner).get(name, ABSENT)
        # A property of the module's class, which an assignment to the module would not replace.
        if isinstance(owner, ModuleType) and self.original is ABSENT and hasattr(type(owner), name):
            return f"{self.label} is an attribute of the type of the module; patch {type(owner)!r}"
        wanted = {param for claim in self.claims for param in claim.patch.params}
        missing = signatures.missing(compose.underlying(raw), wanted) if wanted else ()
        return f"{self.label} has no parameter {', '.join(missing)}" if missing else ""

    def _resolve(self) -> tuple[Any, str, Any]:
        return hooks.resolve(self.patch.module, ".".join(self.patch.path))

    def implementations(self) -> list[Any]:
        """Import the implementations of all claims. Imports run foreign code, so the caller holds no lock."""
        return [load(claim.patch.impl) for claim in self.claims]

    def awaits_implementation(self) -> bool:
        """Return whether the module of any implementation is still being imported, so the site must wait."""
        modules = (claim.patch.impl.partition(":")[0] for claim in self.claims)
        return any(hooks.is_initializing(sys.modules.get(module)) for module in modules)

    def inherit(self, composed: Mapping[Any, Site]) -> None:
        """If the target is a method inherited from a patched base class, wrap the base class's patch.

        Args:
            composed: map from ``(id(owner), slot)`` to the sites that are installed before this one.
        """
        if not isinstance(self.owner, type) or self.original is not ABSENT:
            return
        for base in self.owner.__mro__[1:]:
            below = composed.get((id(base), self.slot))
            if below is not None or self.slot in vars(base):
                self.raw = below.installed if below is not None else self.raw
                return

    def prepare(self, implementations: Iterable[Any]) -> None:
        """Compose the object to install. Call :meth:`locate` first.

        Raises:
            PatchDeclarationError: the implementations do not fit the target.
        """
        replacement, decided = None, False
        wrappers: dict[Any, tuple[str, compose.Decorator]] = {}
        for claim, implementation in zip(self.claims, implementations, strict=True):
            if claim.patch.kind == "wrap":
                # A decorator that several features claim with equal contexts is applied once.
                once = (claim.patch.impl, compose.identity(implementation, claim.context))
                decorate = compose.with_context(implementation, claim.context)
                wrappers.setdefault(once, (claim.patch.impl, decorate))
            elif not decided:  # further replacements name the same object, else check() has refused them
                replacement = implementation(claim.context) if claim.patch.factory else implementation
                decided = True
        deciding = [claim.patch.impl for claim in self.claims if claim.patch.kind != "wrap"][:1]
        self.stack = [*deciding, *(impl for impl, _ in wrappers.values())]
        if self.composed:
            if replacement is not None:
                self._require_fit(replacement)
            self.installed = compose.compose(self.raw, replacement, [*wrappers.values()], self._place())
        elif is_a(replacement, FunctionType) and self.patch.kind == "value":
            # A copy is unique to this site, so that names bound to it can be restored.
            copy = compose.clone(replacement, "the value")
            self.installed = compose.put_at(copy, self.patch.module, ".".join(self.patch.path))
        else:
            self.installed = replacement

    def _require_fit(self, replacement: Any) -> None:
        method = isinstance(self.owner, type) and not is_a(self.raw, staticmethod)
        problems = signatures.misfits(compose.underlying(self.raw), replacement, method)
        if problems:
            raise PatchDeclarationError(
                f"the replacement cannot be called as the original is: {'; '.join(problems)}"
            )

    def _place(self) -> tuple[str, str] | None:
        if isinstance(self.owner, type) and self.original is ABSENT:
            return self.owner.__module__, f"{self.owner.__qualname__}.{self.slot}"
        if isinstance(self.owner, ModuleType) and not is_a(compose.underlying(self.raw), FunctionType):
            # A builtin's __module__ and __qualname__ name its C type; pickle would find the original there.
            return self.patch.module, ".".join(self.patch.path)
        return None

    def linked(self) -> tuple[Any, Any] | None:
        """Return ``(original, patch)`` if other modules may hold the original by name, else ``None``."""
        if self.patch.kind == "entry" or not callable(compose.underlying(self.raw)):
            return None  # unrelated code shares constants, so their identity says nothing
        if isinstance(self.owner, ModuleType):
            return self.raw, self.installed
        if isinstance(self.owner, type) and self.composed:
            return compose.underlying(self.raw), compose.underlying(self.installed)
        return None

    def moved(self) -> tuple[Any, Any] | None:
        """Return ``(original, patch)`` if other modules' names must be rebound from one to the other.

        Returns ``None`` for an inherited method, which belongs to the base class, and for a function that
        the target's module only imports from another package.
        """
        linked = self.linked()
        if linked is None:
            return None
        if isinstance(self.owner, ModuleType):
            return linked if _at_home(self.raw, self.patch.module) else None
        born_here = getattr(linked[0], "__qualname__", "") == f"{self.owner.__qualname__}.{self.slot}"
        return linked if born_here and self.original is not ABSENT else None

    # -- during --------------------------------------------------------------------------------

    def install(self) -> None:
        """Assign the prepared object to the target.

        Raises:
            PatchDeclarationError: the target has another value after the assignment.
        """
        self._put(self.installed)
        # A metaclass or a custom __setattr__ may redirect or drop the assignment.
        if self.present() is not self.installed:
            raise PatchDeclarationError(f"{type(self.owner).__name__} does not keep what is assigned to it")
        self.state, self.reason = "applied", ""

    def _put(self, thing: Any) -> None:
        if self.patch.kind == "entry":
            if thing is ABSENT:
                del self.owner[self.slot]
            else:
                self.owner[self.slot] = thing
        elif thing is ABSENT:
            delattr(self.owner, self.slot)
        else:
            setattr(self.owner, self.slot, thing)

    def present(self) -> Any:
        """Return the current value at the patched target."""
        if self.patch.kind == "entry":
            return self.owner.get(self.slot, ABSENT)
        return vars(self.owner).get(self.slot, ABSENT)

    def executed_again(self) -> bool:
        """Return whether the target's module was reloaded or imported again after the patch."""
        now = hooks.execution(self.patch.module)
        return now is not None and now is not self.execution

    def base_has_changed(self) -> bool:
        """Return whether the target is an inherited method that a base class has replaced after the patch."""
        if not isinstance(self.owner, type) or self.original is not ABSENT:
            return False
        bases = (vars(base) for base in self.owner.__mro__[1:])
        return next((names[self.slot] for names in bases if self.slot in names), self.raw) is not self.raw

    @property
    def lost(self) -> bool:
        """Return whether calls of the target no longer reach the patch."""
        # Other code either restored the original, or installed a function that does not call the patch. The
        # latter is accepted if every patch of the site sets stale="report".
        if self.state != "foreign":
            return False
        live = self.live()
        return live is self.raw or self._passed_over(live)

    def _passed_over(self, live: Any) -> bool:
        if not self.composed or self.stale_is_harmless:
            return False
        return not reach.reaches(live, self.installed)

    def refresh(self) -> None:
        """Set state and reason if other code has replaced the installed patch, or reinstalled it."""
        if self.state not in ("applied", "foreign"):
            return
        live = self.live()
        if live is self.installed:
            self.state, self.reason = "applied", ""
            return
        self.state = "foreign"
        if self.executed_again():
            self.reason = f"{self.patch.module} was executed again after {', '.join(self.features)}"
        elif live is self.raw:
            self.reason = f"other code restored the original after {', '.join(self.features)}"
        else:
            after = ", ".join(self.features)
            self.reason = f"other code re-patched it with {_named(live)} after {after}"
            if self.lost:
                self.reason += (
                    ", which does not call what it replaced; switch one of the two off, or have that code "
                    "run before mindspeed_dsa switches features on"
                )

    def live(self) -> Any:
        """Return the object that a lookup of the target by name finds."""
        if self.patch.module not in sys.modules:
            return self.present()
        try:
            _, _, raw = self._resolve()
        except Exception:  # as in locate()
            return ABSENT
        return raw.get(self.slot, ABSENT) if self.patch.kind == "entry" and isinstance(raw, dict) else raw

    # -- after ---------------------------------------------------------------------------------

    def restore(self) -> None:
        """Put the original object back, unless other code has replaced our patch."""
        if self.present() is not self.installed:
            if self.state == "applied":
                self.refresh()
            return
        self._put(self.original)
        self.state, self.reason = "undone", ""

    def can_be_told_by(self, name: str) -> bool:
        """Return whether a module that binds ``name`` to the installed object imported it from the target.

        Other modules may also import a ``value`` patch's object from the module that defines it. Then only
        a ``name`` equal to the target's name, and unlike the object's own, shows the import from the target.
        """
        own_name = getattr(self.installed, "__name__", None)
        return self.traceable or name == self.slot != own_name

    def release(self) -> None:
        """Drop the undone site's references to original, patch and owner; keep a weak one to the patch."""
        if self.traceable and is_a(compose.underlying(self.installed), FunctionType):
            self.left = weakref.ref(compose.underlying(self.installed))
        self.owner = self.execution = None
        self.original = self.raw = self.installed = ABSENT
        self.rebound, self.stale = [], []


def _named(thing: Any) -> str:
    """Return a function's module and name; for other objects, the ``repr``."""
    function = compose.underlying(thing)
    return holders.function_name(function) if is_a(function, FunctionType) else repr(thing)


def _at_home(thing: Any, package: str) -> bool:
    """Return whether a callable was defined in ``package``; also True if its ``__module__`` is unknown."""
    says = is_a(thing, (type, FunctionType, BuiltinFunctionType, MethodType))
    if not says and "__module__" not in getattr(thing, "__dict__", ()):
        return True  # an instance's __module__ is the module of its class
    owner = getattr(thing, "__self__", None)  # for a builtin: its module or class
    candidates = (getattr(thing, "__module__", None), getattr(owner, "__module__", None))
    home = next((name for name in candidates if isinstance(name, str)), None)
    return home is None or home.partition(".")[0] == package.partition(".")[0]


@dataclass(frozen=True)
class Covered:
    """Another library's object at a patched target: below our patch, or installed over it.

    Attributes:
        name: name of the target.
        found: other library's object.
        is_called: whether the object is still called. Our wrapper calls an object below it, our replacement
            does not.
    """

    name: str
    found: Any
    is_called: bool


@dataclass(frozen=True)
class SiteReport:
    """State of one patch site, as text for reports."""

    target: str
    kind: str
    features: list[str]
    stack: list[str]
    """Implementations, outermost first."""
    state: str
    reason: str
    required: bool
    rebound: int
    """Number of names in other modules that were rebound from the original to the patch."""
    stale: list[str]
    """Holders of the original that cannot be rebound; of an undone site, holders of the patch."""
    notes: list[str]
    """Differences that do not stop the site, such as a function that the fork changed."""
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON."""
        return asdict(self)


def describe(site: Site) -> SiteReport:
    """Build the report of one site."""
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
