"""Installed releases, found without importing them, and the version range of a patch."""

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
"""Range of torch releases that the tests were run on (docs/design/compatibility.md)."""


def untried_torch() -> str | None:
    """Return the installed torch version if it is outside the tested range :data:`TORCH_TRIED`."""
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
    """Return the version of a distribution; Megatron-core's from the package ``root``."""
    return of_megatron(root) if distribution == MEGATRON_DISTRIBUTION else of_package(distribution)


def of_megatron(root: str = "megatron") -> str | None:
    """Return the Megatron-core release by which patches are selected."""
    # A pre-release counts as the release that it leads to. Branches call themselves 0.16.0rc0 for months
    # while they contain the code of 0.16, and PEP 440 puts 0.16.0rc0 outside both `>=0.16` and `<0.16`.
    written = _written(root)
    try:
        version = None if written is None else Version(written)
    except InvalidVersion:
        return written
    return written if version is None or not version.is_prerelease else version.base_version


def of_job(settings: Any) -> str | None:
    """Return :func:`of_megatron` of the package that a job's settings or arguments name."""
    return of_megatron(getattr(settings, "megatron_root", None) or "megatron")


def _written(root: str) -> str | None:
    """Read Megatron-core's version string from ``core/package_info.py``."""
    # The sources take precedence, because a checkout on the path hides an installed wheel, and a fork has
    # no metadata.
    spec = find_spec(root)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "core" / "package_info.py"
        if file.is_file():
            version = version_in_source(file.read_text(encoding="utf-8"))
            if version:
                return version
    try:
        return metadata.version(MEGATRON_DISTRIBUTION) if root == "megatron" else None
    except metadata.PackageNotFoundError:
        return None


def private(path: str, who: str) -> Any:
    """Import a private name of torch, so that a missing one is reported before training starts.

    All of these names are listed in docs/design/torch-privates.md.

    Args:
        path: ``"package.module:name"``.
        who: user of the name, for the message.

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


def is_importable(module: str) -> bool:
    """Return whether a module can be found; imports its parent packages, if it has any."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def parsed(text: str | None) -> Version | None:
    """Return a release as a :class:`Version`; ``None`` without one, or if it is not a PEP 440 version."""
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def release(text: str) -> str:
    """Return the release that a user names, also by its branch ``core_v0.16.1``; raise ValueError if none."""
    return str(Version(text.removeprefix("core_v")))


def version_in_source(text: str) -> str | None:
    """Return the version that a ``package_info.py`` declares with MAJOR, MINOR, PATCH and PRE_RELEASE."""
    values: dict[str, object] = {}
    # Parsed rather than imported, because importing the file would import its packages.
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
    """Return the versions to include in a bug report, ``None`` for packages that are not installed."""
    names = ("mindspeed_dsa", "torch", "torch_npu", "triton", "transformer_engine", "wrapt")
    releases: dict[str, str | None] = {"python": platform.python_version()}
    releases[MEGATRON_DISTRIBUTION] = _written(root)
    return releases | {name: of_package(name) for name in names}


def outside(patch: Patch, version_of: Callable[[str], str | None]) -> str:
    """Return the reason why the patch does not apply to the installed release.

    Empty if it applies, or if the version is unknown or not a PEP 440 version (a fork's commit id).

    Raises:
        PatchDeclarationError: the patch's version range cannot be parsed.
    """
    if not patch.versions:
        return ""
    package = patch.module.partition(".")[0]
    version = version_of(package)
    try:
        covered = covers(patch.versions, version)
    except ValueError as error:
        raise PatchDeclarationError(f"{patch.target}: `versions` is not a PEP 440 range: {error}") from error
    return "" if covered else f"{package} {version} is outside {patch.versions}"


@cache
def covers(versions: str, version: str | None) -> bool:
    """Return whether a range contains the version, or may contain it: ``None``, or a fork's commit id.

    Raises:
        ValueError: the range cannot be parsed.
    """
    declared = SpecifierSet(versions)
    try:
        return version is None or declared.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True
