"""Counts the changes of the one-liner in foreign modules when no feature is on.

Run as a script in a fresh process, independently of the engine: it records by identity every binding in
torch, Megatron-core and their dependencies before and after. It prints two numbers: changed foreign
attributes, and patch sites of the platform. On a machine without an accelerator the platform needs
redirections; bindings to its objects count as its sites.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

# Counters of the interpreter, which any module lookup changes.
_INTERPRETER = ("_frozen_importlib", "_frozen_importlib_external")
_ABSENT = object()


@dataclass(frozen=True)
class Owner:
    """Module or class that binds names; held, so that its ``id`` stays unique."""

    name: str
    thing: Any

    def bindings(self) -> dict[str, Any]:
        """Return its current bindings."""
        if isinstance(self.thing, type):
            return dict(self.thing.__dict__)
        return dict(ModuleType.__getattribute__(self.thing, "__dict__"))


def main() -> None:
    """Snapshot, import the one-liner, snapshot again, and compare."""
    sys.argv = ["train.py"]
    for name in ("torch", "megatron.core.models.gpt"):
        import_module(name)
    before = [(owner, owner.bindings()) for owner in owners()]
    import_module("mindspeed_dsa.megatron_adaptor")
    places, objects, sites = platform_sites()
    changed = [name for owner, old in before for name in changes(owner, old, places, objects)]
    for name in changed[:50]:
        print(f"changed: {name}", file=sys.stderr)
    print(f"{sum(len(old) for _, old in before)} foreign attributes checked", file=sys.stderr)
    print(len(changed), sites)


def owners() -> list[Owner]:
    """Return all foreign modules, and all classes that they bind."""
    by_id: dict[int, Owner] = {}
    for name, module in tuple(sys.modules.items()):
        if issubclass(type(module), ModuleType) and name not in _INTERPRETER:
            by_id.setdefault(id(module), Owner(name, module))
            for value in Owner(name, module).bindings().values():
                if issubclass(type(value), type) and str(value.__module__) not in _INTERPRETER:
                    by_id.setdefault(id(value), Owner(f"{value.__module__}.{value.__qualname__}", value))
    return [owner for owner in by_id.values() if owner.name.partition(".")[0] != "mindspeed_dsa"]


def changes(
    owner: Owner, old: dict[str, Any], places: set[tuple[int, str]], objects: dict[int, Any]
) -> Iterator[str]:
    """Yield attributes bound to other objects than before, without the platform's.

    Args:
        owner: module or class.
        old: owner's bindings before.
        places: ``(id of the owner, name)`` of the platform's targets.
        objects: dict from ``id`` to a function or class of the platform; other modules may bind names to
            them.
    """
    new = owner.bindings()
    for name in {**old, **new}:
        was, now = old.get(name, _ABSENT), new.get(name, _ABSENT)
        # A module imported meanwhile becomes an attribute of its package.
        imported = was is _ABSENT and isinstance(now, ModuleType)
        ours = (id(owner.thing), name) in places or id(now) in objects
        if was is not now and not ours and not imported:
            yield f"{owner.name}.{name}"


def platform_sites() -> tuple[set[tuple[int, str]], dict[int, Any], int]:
    """Return places and objects of the platform's patches, and the number of its sites."""
    from mindspeed_dsa import session

    running = session.current()
    if running is None:
        raise SystemExit("the one-liner started no session")
    features = running.features
    others = [feature.name for feature in features if not feature.platform_support]
    if others:
        raise SystemExit(f"this measures the state without features, but {', '.join(others)} is on")
    places: set[tuple[int, str]] = set()
    objects: dict[int, Any] = {}
    applied = [site for site in running.report() if site.state == "applied"]
    for site in applied:
        target, _, key = site.target.removesuffix("]").partition("[")
        module, _, path = target.partition(":")
        *parents, name = path.split(".")
        owner: Any = sys.modules[module]
        for parent in parents:
            owner = getattr(owner, parent)
        if key:  # the item of a module's own dictionary
            name = ast.literal_eval(key)
        places.add((id(owner), name))
        thing = inspect.getattr_static(owner, name)
        if callable(thing):
            objects[id(thing)] = thing
    return places, objects, len(applied)


if __name__ == "__main__":
    main()
