"""Releases that are installed, found without importing them, and whether a patch is declared for one."""

from __future__ import annotations

import ast
import platform
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from mindspeed_dsa.patches.errors import PatchDeclarationError
from mindspeed_dsa.patches.spec import Patch

MEGATRON_DISTRIBUTION = "megatron-core"
TORCH_TRIED = ">=2.7,<2.15"
"""Releases of torch, oldest to newest, that the tests were run on (docs/design/compatibility.md)."""


def untried_torch() -> str | None:
    """Return the installed torch, if the tests were run on neither it nor on an older and a newer one."""
    version = of_package("torch")
    tried = version is None or SpecifierSet(TORCH_TRIED).contains(version, prereleases=True)
    return None if tried else version


def of_package(package: str, root: str = "megatron") -> str | None:
    """Return the version of a top-level package; for Megatron (``root``) from its own sources."""
    if package == root:
        return of_megatron(root)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def of_distribution(distribution: str, root: str = "megatron") -> str | None:
    """Return the version of a distribution; Megatron-core's from the package that ``root`` names."""
    return of_megatron(root) if distribution == MEGATRON_DISTRIBUTION else of_package(distribution)


def of_megatron(root: str = "megatron") -> str | None:
    """Return the release of Megatron-core that decides what is patched.

    A pre-release counts as the release that it leads to: branches call themselves 0.16.0rc0 for months, while
    their code is that of 0.16, and PEP 440 puts them outside of ``>=0.16`` and of ``<0.16`` alike.
    """
    written = _written(root)
    try:
        version = None if written is None else Version(written)
    except InvalidVersion:
        return written
    return written if version is None or not version.is_prerelease else version.base_version


def _written(root: str) -> str | None:
    """Read Megatron-core's version from ``core/package_info.py``, as it stands there.

    A checkout on the path hides an installed wheel, and a fork has no metadata at all, so the sources take
    precedence.
    """
    spec = find_spec(root)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "core" / "package_info.py"
        if file.is_file():
            found = version_in_source(file.read_text(encoding="utf-8"))
            if found:
                return found
    try:
        return metadata.version(MEGATRON_DISTRIBUTION) if root == "megatron" else None
    except metadata.PackageNotFoundError:
        return None


def private(path: str, who: str) -> Any:
    """A private name of torch, looked for where a module that needs it is imported, before anything trains.

    All of them are listed in docs/design/torch-privates.md.

    Args:
        path: ``"package.module:name"``.
        who: what needs it, to say in the message.

    Raises:
        ImportError: this torch has no such name.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"mindspeed_dsa: torch {of_package('torch')} has no {module}.{name}, which {who} needs; use a "
            f"torch release in {TORCH_TRIED}, or switch that off"
        ) from error


def version_in_source(text: str) -> str | None:
    """The version that a ``package_info.py`` declares with MAJOR, MINOR, PATCH and PRE_RELEASE."""
    values: dict[str, object] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    try:
        return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"
    except KeyError:
        return None


def installed(root: str = "megatron") -> dict[str, str | None]:
    """Return the versions to include in a bug report."""
    names = ("mindspeed_dsa", "torch", "torch_npu", "triton", "transformer_engine", "wrapt")
    found: dict[str, str | None] = {"python": platform.python_version()}
    found[MEGATRON_DISTRIBUTION] = _written(root)
    return found | {name: of_package(name) for name in names}


def outside(patch: Patch, version_of: Callable[[str], str | None]) -> str:
    """Say why the patch does not apply to this release; empty if it does, or if that is unknown.

    An unknown version, or one that PEP 440 does not allow (a fork's commit id), is never outside.

    Raises:
        PatchDeclarationError: the row's range cannot be parsed.
    """
    if not patch.versions:
        return ""
    package = patch.module.partition(".")[0]
    version = version_of(package)
    try:
        covered = _covers(patch.versions, version)
    except ValueError as error:
        raise PatchDeclarationError(f"{patch.target}: `versions` is not a PEP 440 range: {error}") from error
    return "" if covered else f"{package} {version} is outside {patch.versions}"


@cache
def _covers(versions: str, version: str | None) -> bool:
    """Return whether a range has the version, or could have it.

    Raises:
        ValueError: the range cannot be parsed.
    """
    declared = SpecifierSet(versions)
    try:
        return version is None or declared.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True
