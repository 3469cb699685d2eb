"""Patch declaration: target, kind, implementation and reason."""

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
        target: ``"package.module:name"`` or ``"package.module:Class.method"``; for ``entry`` the dictionary,
            with the key in :attr:`key`. Name a function in the module that defines it: a name that a module
            imported from another package is patched only in that module.
        kind: one of four kinds. ``replace``: the function ``impl`` replaces the target. ``wrap``: ``impl`` is
            a decorator, called once with the wrapped function, that returns a plain function. ``value``: the
            object ``impl`` is assigned. Constants, classes and descriptors are assigned as is, and a plain
            function as a copy, so that undo can distinguish sites that share it. ``entry``: the object
            ``impl`` becomes the dictionary's item under :attr:`key`.
        impl: ``"package.module:name"``, imported after the target's module.
        why: one-line reason for doctor, the docs and the table of patched symbols.
        params: parameter names of the target that ``impl`` relies on, checked before anything is modified.
        versions: PEP 440 range of the target package's distribution (Megatron-core for ``megatron``). Outside
            of the range the site is skipped and the reason is reported.
        required: whether a missing or changed target, or a remaining reference to the original, fails the
            run. If false it is only reported, because the package may not be installed. A missing target in a
            recorded release inside ``versions`` is an error of the record either way.
        priority: nesting order of the wrappers of one target, the highest outermost. At equal priority the
            later feature is outside.
        key: dictionary key of an ``entry``.
        stale: consequence for a required site if a default argument, closure or container keeps a reference
            to the original: ``error``, or ``report`` if the target's own package keeps harmless references.
            Also applies if other code replaces the patch.
        factory: whether ``impl`` is a function that is called once with the claim's context and returns the
            object to assign. Not for ``wrap``: a decorator gets the context if it takes a second positional
            parameter.
        in_place_of: description of the calls for which a ``wrap`` does not call the original, for example
            "layers with DSA". A fork's change to the original has no effect on these calls.
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
        """Module part of the target."""
        return self.target.partition(":")[0]

    @cached_property
    def path(self) -> tuple[str, ...]:
        """Attribute path in the module: ``("Class", "method")``."""
        return tuple(self.target.partition(":")[2].split("."))

    @property
    def label(self) -> str:
        """The target as doctor and messages print it."""
        return self.target if self.key is None else f"{self.target}[{self.key!r}]"

    def under_root(self, root: str) -> Patch:
        """Return the same patch for a fork whose top-level package is ``root`` instead of ``megatron``."""
        if root == "megatron":
            return self
        return replace(self, target=_rooted(self.target, root), impl=_rooted(self.impl, root))


def _rooted(dotted: str, root: str) -> str:
    module, _, path = dotted.partition(":")
    head, dot, rest = module.partition(".")
    return f"{root}{dot}{rest}:{path}" if head == "megatron" else dotted


@dataclass(frozen=True)
class Claim:
    """A patch together with the feature that declares it, and the feature's position in the nesting order.

    ``context`` is opaque to the engine and is passed to implementations that take one. ``label`` is the
    feature's name in messages and defaults to ``feature``.
    """

    feature: str
    patch: Patch
    order: int = 0
    context: Any = None
    label: str = ""

    @property
    def who(self) -> str:
        """Feature's name for messages."""
        return self.label or self.feature
