"""Version ranges: is a patch declared for the installed release?"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mindspeed_dsa.patches.errors import PatchDeclarationError
from mindspeed_dsa.patches.spec import Patch


def outside(patch: Patch, version_of: Callable[[str], str | None]) -> str:
    """Why the patch does not apply to this release; empty if it does, or if that is unknown.

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
    # Slow to import, and most sessions have no such row.
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    declared = SpecifierSet(versions)
    try:
        return version is None or declared.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True
