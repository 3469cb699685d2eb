"""Stub packages on disk, implementations of patches for them, and snapshots of their bindings."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_dsa.patches import Claim, Patch, PatchManager

# Names of all stub packages; `snapshot` and `close` look at no others.
PACKAGES = ("house", "house_impl", "house_switch", "guest", "library")

FILES = {
    "house/__init__.py": "from house.core import area",
    "house/core.py": """
        import abc


        def area(x, factor=2):
            '''The area.'''
            return x * factor


        def volume(x, *, height=1):
            return x * height


        HEIGHT = 3


        class Room:
            def __init__(self, size=1):
                self.size = size

            def paint(self, colour="white"):
                '''Paint it.'''
                return f"{colour} room of {self.size}"

            def sweep(self):
                return "swept"

            @staticmethod
            def unit(x=1):
                return x

            @classmethod
            def build(cls, size=1):
                return cls(size)

            @property
            def door(self):
                '''The door.'''
                return "closed"

            @door.setter
            def door(self, value):
                self.size = value


        class Kitchen(Room):
            def paint(self, colour="green"):
                return super().paint(colour) + " with a stove"


        class Plan(abc.ABC):
            @abc.abstractmethod
            def draw(self): ...
        """,
    "house/tables.py": """
        LIMITS = {"floors": 2, "rooms": 9}
        """,
    # Bindings in a consumer: a from-import, an alias, and a call through them.
    "house/consumer.py": """
        from house.core import area
        from house.core import area as surface


        def use(x):
            return surface(x)
        """,
    "guest.py": """
        from house import area


        def visit(x):
            return area(x)
        """,
    "house_switch.py": """
        ACTIONS = []


        def flip():
            for action in ACTIONS:
                action()
        """,
    "house_impl.py": """
        CALLS = []


        def counted(original):
            def wrapper(*args, **kwargs):
                CALLS.append(getattr(original, "__qualname__", "?"))
                return original(*args, **kwargs)

            return wrapper


        def mark(text):
            def decorator(original):
                def wrapper(*args, **kwargs):
                    return f"{text}({original(*args, **kwargs)})"

                return wrapper

            return decorator


        mark_a, mark_b, mark_c = mark("a"), mark("b"), mark("c")


        def tenfold(x, factor=2):
            '''Ten times.'''
            return 10 * x


        def hundredfold(x, factor=2):
            return 100 * x


        def noop(*args, **kwargs):
            return None


        NUMBER = 7
        """,
}


class House:
    """Writes stub packages, imports them, and arms patch managers on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.managers: list[PatchManager] = []
        self.write(FILES)

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text), encoding="utf-8")
        # Import caches the listings of folders, and would miss new files.
        importlib.invalidate_caches()

    def manager(self, *patches: Patch, features: tuple[str, ...] = (), **kwargs: Any) -> PatchManager:
        """Return a manager that has planned the patches; features are named f0, f1, ... by default."""
        manager = PatchManager(**kwargs)
        self.managers.append(manager)
        names = features or tuple(f"f{i}" for i in range(len(patches)))
        manager.plan(
            Claim(name, patch, i) for i, (name, patch) in enumerate(zip(names, patches, strict=True))
        )
        return manager

    def armed(self, *patches: Patch, **kwargs: Any) -> PatchManager:
        manager = self.manager(*patches, **kwargs)
        manager.check()
        manager.arm()
        return manager

    def close(self) -> None:
        for manager in self.managers:
            manager.undo()
        # The next test writes and imports packages of its own.
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]


def patch(target: str, kind: str = "wrap", impl: str = "house_impl:counted", **kwargs: Any) -> Patch:
    """Return a patch with a reason; ``core:area`` is short for ``house.core:area``."""
    if not target.startswith(PACKAGES):
        target = f"house.{target}"
    return Patch(target, kind, impl, "test", **kwargs)  # type: ignore[arg-type]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def states(manager: PatchManager) -> list[str]:
    return [site.state for site in manager.report()]


def snapshot() -> dict[tuple[str, str], Any]:
    """Return every binding in the stub packages: module names, class attributes, dictionary items."""
    bindings: dict[tuple[str, str], Any] = {}
    for module_name, module in tuple(sys.modules.items()):
        if module_name.partition(".")[0] not in PACKAGES or not isinstance(module, ModuleType):
            continue
        for name, value in tuple(vars(module).items()):
            # Importing a submodule binds it in its package, which is no patch.
            if name == "__builtins__" or isinstance(value, ModuleType):
                continue
            bindings[module_name, name] = value
            if isinstance(value, type) and value.__module__ == module_name:
                bindings |= {(f"{module_name}.{name}", key): item for key, item in vars(value).items()}
            elif isinstance(value, dict):
                bindings |= {(f"{module_name}.{name}", repr(key)): item for key, item in value.items()}
    return bindings


def assert_identical(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> None:
    """Check that all names are bound to the same objects in the same order; new modules are allowed."""
    modules = {module for module, _ in before}
    after = {key: value for key, value in after.items() if key[0] in modules}
    changed = [key for key in before if key not in after or after[key] is not before[key]]
    assert not changed, f"changed: {changed}"
    assert list(after) == list(before)
