"""Detection of other libraries that patch Megatron. Two are refused, others only reported."""

from __future__ import annotations

import argparse
import ast
import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from mindspeed_dsa import features
from mindspeed_dsa.patches import Covered, compose, versions
from mindspeed_dsa.patches.errors import shortened
from mindspeed_dsa.patches.signatures import is_a
from mindspeed_dsa.settings import Settings

_NAMED = 3  # most functions that one message names


@dataclass(frozen=True)
class Patcher:
    """Library that patches the same functions and has the same flags, so that using both is an error.

    Attributes:
        name: library's name.
        packages: library's top-level packages, which are also its distribution names.
        do: advice to the user, for messages.
        engine: ``module:class`` with an attribute ``patches_info`` that lists the patched functions.
        flags: ``module:class`` with a method ``register_features_args`` that adds the library's flags to a
            parser.
        by: module that applies the patches when it is imported.
    """

    name: str
    packages: tuple[str, ...]
    do: str
    engine: str
    flags: str
    by: str = "megatron_adaptor"


PATCHERS = (
    Patcher(
        "MindSpeed",
        ("mindspeed", "mindspeed_llm", "mindspeed_mm", "mindspeed_rl"),
        "remove `import mindspeed.megatron_adaptor` (or that of mindspeed_llm) from the training script, see "
        "docs/migrate.md, or train without mindspeed_dsa",
        "mindspeed.patch_utils:MindSpeedPatchesManager",
        "mindspeed.features_manager.features_manager:MindSpeedFeaturesManager",
    ),
    Patcher(
        "MegatronAdaptor",
        ("megatron_adaptor",),
        "remove `import megatron_adaptor` from the training script, or unset VERL_USE_MEGATRON_ADAPTOR: this "
        "library runs Megatron on NPUs itself; or train without mindspeed_dsa",
        "megatron_adaptor.patches.patch_manager:PatchesManager",
        "megatron_adaptor.features_manager.features_manager:FeaturesManager",
    ),
)
_MEGATRONS = frozenset({"torch", "transformer_engine", "apex", "triton", "einops", "numpy", "mindspeed_dsa"})
"""Packages whose functions are found at patched sites in stock Megatron too, plus this package."""


@dataclass(frozen=True)
class Presence:
    """Patch targets of this library that another package has patched too.

    Attributes:
        package: top-level package that defines the functions.
        places: targets at which the package's function is still called.
        dropped: targets at which our replacement is called instead of the package's function.
    """

    package: str
    places: tuple[str, ...]
    dropped: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON."""
        return {"library": self.package, "places": [*self.places], "dropped": [*self.dropped]}

    def __str__(self) -> str:
        said = [f"{self.package} has changed {shortened(self.places, _NAMED)}"] if self.places else []
        if self.dropped:
            dropped = shortened(self.dropped, _NAMED)
            said.append(f"the function of {self.package} in place of {dropped} is no longer called")
        return "; ".join(said)


def refusal(active: bool, resolved: Settings) -> str | None:
    """Return a message about a library that cannot share the process with this one, or ``None``.

    Args:
        active: whether a feature of this library is on.
        resolved: resolved settings. The message names the flags that both libraries would act on.
    """
    patched = {patcher: _patched(patcher) for patcher in PATCHERS} if active else {}
    loaded = {patcher: names for patcher, names in patched.items() if names}
    if not loaded:
        return None
    who = " and ".join(patcher.name for patcher in loaded)
    names = list(dict.fromkeys(name for functions in loaded.values() for name in functions))
    return (
        f"mindspeed_dsa: {who} has patched {len(names)} functions of this process "
        f"({shortened(names, _NAMED)}), and only one of the two libraries can be in it"
        f"{_acting_twice(loaded, resolved)}: "
        f"{'; '.join(patcher.do for patcher in loaded)}"
    )


def _acting_twice(found: Iterable[Patcher], resolved: Settings) -> str:
    ours = {flag.name: flag.dest for flag in features.all_flags() if not flag.megatron}
    shared = sorted(ours.keys() & {name for patcher in found for name in _flags(patcher)})
    if not shared:
        return ""
    used = [name for name in shared if ours[name] in resolved.chosen()]
    if not used:
        return f" (both know {len(shared)} flags, as {', '.join(shared[:_NAMED])})"
    more = len(shared) - len(used)
    also = f", as would {more} more if they were given" if more else ""
    return f" ({', '.join(used)} would act twice{also})"


def _patched(patcher: Patcher) -> list[str]:
    """Return the names of the functions that a library has patched in this process."""
    return [str(name) for name in getattr(_loaded(patcher.engine), "patches_info", None) or ()]


def _flags(patcher: Patcher) -> list[str]:
    """Return the flags of a loaded library; empty if they cannot be listed."""
    # A parser of our own collects the flags that the library registers.
    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    with contextlib.suppress(Exception):  # foreign code: its failure only shortens our message
        _loaded(patcher.flags).register_features_args(parser)
    return [name for action in parser._actions for name in action.option_strings]


def _loaded(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(sys.modules.get(module), name, None)


def present(root: str, covered: Iterable[Covered]) -> list[Presence]:
    """Return the other packages that have patched targets of this library.

    Args:
        root: top-level package of Megatron.
        covered: result of ``PatchManager.covered``.
    """
    by_package: dict[str, tuple[list[str], list[str]]] = {}
    for place in covered:
        package = _home(place.found).partition(".")[0]
        expected = {"", root, place.name.partition(".")[0]} | _MEGATRONS | sys.stdlib_module_names
        if package not in expected:
            by_package.setdefault(package, ([], []))[not place.is_called].append(place.name)
    return [Presence(package, tuple(places), tuple(gone)) for package, (places, gone) in by_package.items()]


def _home(thing: Any) -> str:
    """Return the module that defines a function or class; empty for anything else.

    A function's globals are used, because ``functools.wraps`` copies the original's ``__module__`` to a
    wrapper.
    """
    # Look through static methods, class methods and properties.
    thing = compose.underlying(thing)
    if is_a(thing, partial):
        thing = thing.func
    if is_a(thing, FunctionType):
        return str(thing.__globals__.get("__name__", ""))
    return thing.__module__ if is_a(thing, type) and isinstance(thing.__module__, str) else ""


def _of(module: str) -> Patcher | None:
    package = module.partition(".")[0]
    return next((each for each in PATCHERS if package in each.packages), None)


def installed() -> dict[Patcher, str]:
    """Return the libraries that can be imported here, with their release; imports nothing."""
    releases = {}
    for patcher in PATCHERS:
        release = next(filter(None, map(versions.of_package, patcher.packages)), "")
        if release or any(_exists(package) for package in patcher.packages):
            releases[patcher] = release or "of unknown release"
    return releases


def _exists(package: str) -> bool:
    """Return whether a package can be imported. A folder without ``__init__.py`` does not count."""
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(package)
        # A namespace package has no origin.
        return spec is not None and spec.origin is not None
    return False


def imported_by(script: str) -> dict[Patcher, list[str]]:
    """Return the libraries that a script imports, with the import statements as ``line 3: import x``.

    Args:
        script: path of a Python file; the result is empty if it cannot be read.
    """
    statements: dict[Patcher, list[str]] = {}
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return statements
    # Walks the whole tree, because imports may be inside functions or conditions.
    for node in ast.walk(tree):
        for module in _imports(node):
            if (patcher := _of(module)) is not None:
                line = getattr(node, "lineno", 0)
                statements.setdefault(patcher, []).append(f"line {line}: {ast.unparse(node)}")
    return statements


def _imports(node: ast.AST) -> Sequence[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def refused_imports(found: Mapping[Patcher, Sequence[str]]) -> Iterator[str]:
    """Yield a problem for each import statement of a script that would apply another library's patches."""
    for patcher, lines in found.items():
        for line in lines:
            if patcher.by in line:
                yield f"{line}: {patcher.name} patches what this library patches; {patcher.do}"
