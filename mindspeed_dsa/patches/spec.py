"""Patch: one frozen row with target, kind, implementation and reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from mindspeed_dsa.patches.errors import PatchDeclarationError

Kind = Literal["replace", "wrap", "value", "entry"]
KINDS: tuple[Kind, ...] = ("replace", "wrap", "value", "entry")
STALE = ("error", "report")


@dataclass(frozen=True)
class Patch:
    """One change to one attribute of a third-party module.

    Attributes:
        target: ``"package.module:name"``, ``"package.module:Class.method"``; for ``entry`` the
            dictionary, with the key in :attr:`key`. Name a function where it is defined: a name that a
            module imported from another package is patched in that module alone.
        kind: ``replace``: the function named by ``impl`` replaces the target.
            ``wrap``: ``impl`` is a decorator, called once with the function it wraps and
            returning a plain function. ``value``: the object that ``impl`` names is assigned
            (a constant, a class, a descriptor as it is; a plain function as a copy, so that undo can
            tell apart the sites that share it). ``entry``: that object becomes the dictionary's item
            under :attr:`key`.
        impl: lazy ``"package.module:name"``; imported when the target's module has been imported.
        why: one line for doctor, the docs and the table of patched symbols.
        params: parameter names of the target that ``impl`` relies on; checked before anything is
            mutated.
        versions: PEP 440 range of the target package's distribution (Megatron-core for
            ``megatron``); outside of it the site is skipped with the reason.
        required: a target that is missing, drifted or still reachable through a stale reference
            fails the run when true, and is only reported when false: its package may not be installed. In a
            recorded release inside of ``versions`` a missing target is an error of the record all the same.
        priority: wrappers of one target nest by it, the highest outermost; at equal priority the
            feature that comes later in the order is the outer one.
        key: the dictionary key of an ``entry``.
        stale: what a reference to the original that cannot be rebound (a default argument, a
            closure, a container) means for a required site: ``error``, or ``report`` where the
            target's own package keeps such tables and they do no harm; likewise what other code that replaces
            the patch means.
        factory: for kinds other than ``wrap``: ``impl`` is a function that is called once with the
            claim's context and returns the object to assign. (A ``wrap`` decorator gets the context if
            it takes a second positional parameter.)
        in_place_of: calls for which a ``wrap`` computes the result itself and does not call the
            original, in words, as "layers with DSA"; a fork's change of the function is lost there.
    """

    target: str
    kind: Kind
    impl: str
    why: str
    params: tuple[str, ...] = ()
    versions: str = ""
    required: bool = True
    priority: int = 0
    key: Any = None
    stale: Literal["error", "report"] = "error"
    factory: bool = False
    in_place_of: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PatchDeclarationError(
                f"{self.target}: kind {self.kind!r} is unknown; use one of {', '.join(KINDS)}"
            )
        for field in ("target", "impl"):
            module, _, name = getattr(self, field).partition(":")
            if not module or not all(name.split(".")):
                raise PatchDeclarationError(
                    f"{field} {getattr(self, field)!r} must read 'package.module:name'"
                )
        if not self.why:
            raise PatchDeclarationError(f"{self.target}: say in `why` what the patch is for")
        if (self.key is None) == (self.kind == "entry"):
            raise PatchDeclarationError(f"{self.target}: `key` goes with kind 'entry' and no other")
        if self.factory and self.kind == "wrap":
            raise PatchDeclarationError(
                f"{self.target}: a decorator gets the context if it takes (original, context); drop `factory`"
            )
        if not isinstance(self.params, tuple):
            raise PatchDeclarationError(f"{self.target}: `params` is a tuple of names")
        if self.stale not in STALE:
            raise PatchDeclarationError(f"{self.target}: `stale` is {' or '.join(STALE)}, not {self.stale!r}")

    @cached_property
    def module(self) -> str:
        """Dotted module part of the target."""
        return self.target.partition(":")[0]

    @cached_property
    def path(self) -> tuple[str, ...]:
        """Attribute path below the module: ``("Class", "method")``."""
        return tuple(self.target.partition(":")[2].split("."))

    @property
    def label(self) -> str:
        """The target as doctor and messages print it."""
        return self.target if self.key is None else f"{self.target}[{self.key!r}]"

    def under_root(self, root: str) -> Patch:
        """The same row for a fork whose top-level package is ``root`` instead of ``megatron``."""
        if root == "megatron":
            return self
        return replace(self, target=_rooted(self.target, root), impl=_rooted(self.impl, root))


def _rooted(dotted: str, root: str) -> str:
    module, _, path = dotted.partition(":")
    head, dot, rest = module.partition(".")
    return f"{root}{dot}{rest}:{path}" if head == "megatron" else dotted


@dataclass(frozen=True)
class Claim:
    """A patch together with the feature that claims it and that feature's place in the order.

    ``context`` is opaque to the engine: implementations that take one are composed with it. ``label`` is the
    feature as messages name it, by default its name.
    """

    feature: str
    patch: Patch
    order: int = 0
    context: Any = None
    label: str = ""

    @property
    def who(self) -> str:
        """For messages."""
        return self.label or self.feature
