"""Other libraries that change Megatron in place: two are refused, others named by the sites they changed."""

from __future__ import annotations

import argparse
import ast
import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from mindspeed_dsa import features
from mindspeed_dsa.patches import Covered, compose
from mindspeed_dsa.patches.signatures import is_a
from mindspeed_dsa.settings import Settings

_NAMED = 3  # a message names so many functions


@dataclass(frozen=True)
class Patcher:
    """A library with the same targets and flags: only one of the two can be in a process.

    Attributes:
        name: name that its users know.
        packages: top-level packages, which are also names of its distributions.
        do: way out for a job.
        engine: ``module:class`` whose ``patches_info`` lists what it has patched.
        flags: ``module:class`` whose ``register_features_args`` adds its flags to a parser.
        by: module whose import patches.
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
"""Packages whose functions Megatron itself has under its names, and this one."""


@dataclass(frozen=True)
class Presence:
    """Functions of one package at sites that this library patches.

    Attributes:
        package: top-level package in which they were written.
        places: sites where they are called.
        dropped: sites where a replacement of this library has taken their place.
    """

    package: str
    places: tuple[str, ...]
    dropped: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"library": self.package, "places": [*self.places], "dropped": [*self.dropped]}

    def __str__(self) -> str:
        said = [f"{self.package} has changed {_listed(self.places)}"] if self.places else []
        if self.dropped:
            said.append(
                f"the function of {self.package} in place of {_listed(self.dropped)} is no longer called"
            )
        return "; ".join(said)


def refusal(active: bool, resolved: Settings) -> str | None:
    """Say what to do about a library that cannot share a process with this one; None without one.

    Args:
        active: whether a feature of this library is on.
        resolved: the settings, of which those are named that the other library acts on too.
    """
    patched = {each: _patched(each) for each in PATCHERS} if active else {}
    found = {each: names for each, names in patched.items() if names}
    if not found:
        return None
    who = " and ".join(each.name for each in found)
    names = list(dict.fromkeys(name for every in found.values() for name in every))
    return (
        f"mindspeed_dsa: {who} has patched {len(names)} functions of this process ({_listed(names)}), and "
        f"only one of the two libraries can be in it{_acting_twice(found, resolved)}: "
        f"{'; '.join(each.do for each in found)}"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _acting_twice(found: Iterable[Patcher], resolved: Settings) -> str:
    ours = {flag.name: flag.dest for flag in features.all_flags() if not flag.megatron}
    shared = sorted(ours.keys() & {name for each in found for name in _flags(each)})
    if not shared:
        return ""
    given = [name for name in shared if ours[name] in resolved.chosen()]
    if not given:
        return f" (both know {len(shared)} flags, as {', '.join(shared[:_NAMED])})"
    more = len(shared) - len(given)
    also = f", as would {more} more if they were given" if more else ""
    return f" ({', '.join(given)} would act twice{also})"


def _patched(patcher: Patcher) -> list[str]:
    """Return what an engine has patched in this process, by its own account."""
    return [str(name) for name in getattr(_loaded(patcher.engine), "patches_info", None) or ()]


def _flags(patcher: Patcher) -> list[str]:
    """Return the flags of a library that is loaded; none where it cannot say."""
    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    with contextlib.suppress(Exception):  # its own code, whose failure is not what is to be told here
        _loaded(patcher.flags).register_features_args(parser)
    return [name for action in parser._actions for name in action.option_strings]


def _loaded(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(sys.modules.get(module), name, None)


def present(root: str, covered: Iterable[Covered]) -> list[Presence]:
    """Return the packages whose functions stand at patched sites, or did until a patch replaced them.

    Args:
        root: top-level package of Megatron.
        covered: objects that other code has, or had, in the places of patches.
    """
    found: dict[str, tuple[list[str], list[str]]] = {}
    for each in covered:
        package = _home(each.found).partition(".")[0]
        known = {"", root, each.name.partition(".")[0]} | _MEGATRONS | sys.stdlib_module_names
        if package not in known:
            found.setdefault(package, ([], []))[not each.is_called].append(each.name)
    return [Presence(package, tuple(places), tuple(gone)) for package, (places, gone) in found.items()]


def _home(thing: Any) -> str:
    """Return the module in whose source a function or class was written; empty for anything else.

    A wrapper made with ``functools.wraps`` has the original's ``__module__``, but not its globals.
    """
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
    """Return the libraries that could be imported here, each with its release; nothing is imported."""
    found = {}
    for patcher in PATCHERS:
        release = next(filter(None, map(_release, patcher.packages)), "")
        if release or any(_exists(package) for package in patcher.packages):
            found[patcher] = release or "of unknown release"
    return found


def _release(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _exists(package: str) -> bool:
    """Return whether a package lies on the path; a folder without modules in it, as a checkout's, is none."""
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(package)
        return spec is not None and spec.origin is not None
    return False


def imported_by(script: str) -> dict[Patcher, list[str]]:
    """Return the libraries that a script imports, each with the imports, as ``line 3: import x``.

    Args:
        script: path of a Python file; one that cannot be read imports nothing.
    """
    found: dict[Patcher, list[str]] = {}
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        for module in _imports(node):
            if (patcher := _of(module)) is not None:
                line = getattr(node, "lineno", 0)
                found.setdefault(patcher, []).append(f"line {line}: {ast.unparse(node)}")
    return found


def _imports(node: ast.AST) -> Sequence[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def refused_imports(found: Mapping[Patcher, Sequence[str]]) -> Iterator[str]:
    """Yield a problem for each import of a script that would patch what this library patches."""
    for patcher, lines in found.items():
        for line in lines:
            if patcher.by in line:
                yield f"{line}: {patcher.name} patches what this library patches; {patcher.do}"
