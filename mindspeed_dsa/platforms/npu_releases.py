"""Releases of torch_npu and CANN: pairs that the vendor's tables call compatible, and the installed pair.

The tables are torch_npu's ``COMPATIBILITY.md`` and its release notes for 7.2.0 and 26.1.0, from August 2026.
Importing this does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from mindspeed_dsa.environment import Finding
from mindspeed_dsa.patches.versions import parsed


@dataclass(frozen=True)
class Release:
    """Release of Ascend's torch extension, which is built for several PyTorch releases.

    Attributes:
        name: vendor's release number.
        cann: CANN release that was published together with it.
        torch_npu: versions of its wheels, one per PyTorch release.
    """

    name: str
    cann: str
    torch_npu: tuple[str, ...]

    def __str__(self) -> str:
        *most, last = self.torch_npu
        wheels = f"{', '.join(most)} or {last}" if most else last
        return f"torch_npu {wheels} with CANN {self.cann}, or newer ones"

    def wheel(self, torch: str) -> str | None:
        """Return the version of the torch_npu wheel for a torch release, or ``None``."""
        return next((each for each in self.torch_npu if _release(each) == _release(torch)), None)


V7_1 = Release("7.1.0", "8.2.RC1", ("2.6.0",))
V7_2 = Release("7.2.0", "8.3.RC1", ("2.6.0.post3", "2.7.1", "2.8.0"))
V7_3 = Release("7.3.0", "8.5.0", ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"))
V26_0 = Release("26.0.0", "9.0.0", ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"))
V26_1 = Release("26.1.0", "9.1.0", ("2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0"))
RELEASES = (V7_1, V7_2, V7_3, V26_0, V26_1)
"""Releases, oldest first."""
_TOGETHER = (
    ((V7_1, V7_2), ("8.0", "8.1", "8.2", "8.3")),
    ((V7_3, V26_0, V26_1), ("8.5", "9.0", "9.1")),
)
"""Groups of extension releases with the CANN series that the vendor calls compatible with all of them."""
_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_INSTALLED = re.compile(r"^version\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)
_CONFIGURED = re.compile(r"^toolkit_(?:running|installed)_version=.*:([^\]:]+)\]", re.MULTILINE)
_SERIES = re.compile(r"(\d+)\.(\d+)")


def compatible(release: Release) -> tuple[str, ...]:
    """Return the CANN series that the vendor calls compatible with a release, including its own."""
    return next(canns for releases, canns in _TOGETHER if release in releases)


def release_of(torch_npu: str) -> Release | None:
    """Return the vendor's release that a torch_npu wheel belongs to, or ``None`` if its torch is unsupported.

    A wheel whose version is between two releases is a patch of the older one.
    """
    number = parsed(torch_npu)
    # Newest first. 2.7.1.post5 is older than 26.1.0's 2.7.1.post8 and newer than 26.0.0's 2.7.1.post4, so
    # it belongs to 26.0.0.
    for release in reversed(RELEASES):
        first = release.wheel(torch_npu)
        if first is not None and number is not None and number >= Version(first):
            return release
    return None


def installed_cann(variables: Mapping[str, str]) -> str | None:
    """Return the release of the CANN whose ``set_env.sh`` was sourced, or ``None`` if unknown.

    Args:
        variables: environment variables, which name CANN's folder.
    """
    for home in filter(None, map(variables.get, _HOMES)):
        # Toolkits for both processor architectures may be installed; prefer this machine's.
        own = Path(home, f"{platform.machine()}-linux", "ascend_toolkit_install.info")
        files = [own, *sorted(Path(home).glob("*-linux/ascend_toolkit_install.info"))]
        for pattern, names in ((_INSTALLED, files), (_CONFIGURED, [Path(home, "version.cfg")])):
            for name in names:
                with contextlib.suppress(OSError):
                    if found := pattern.search(name.read_text(encoding="utf-8", errors="replace")):
                        return found.group(1)
    return None


def cann_here() -> str:
    """Return the CANN release in words, for ``doctor``."""
    release = installed_cann(os.environ)
    named = [f"{name}={os.environ[name]}" for name in _HOMES if os.environ.get(name)]
    where = f"no version in {', '.join(named)}" if named else f"neither {' nor '.join(_HOMES)} is set"
    return release or f"unknown: {where}"


def disagreements(torch: str | None, torch_npu: str | None, cann: str | None) -> Iterator[Finding]:
    """Yield the first mismatch between torch, torch_npu and CANN; nothing if the tables lack the releases.

    Args:
        torch: release of torch, ``None`` if unknown.
        torch_npu: version of the torch_npu wheel, ``None`` if unknown.
        cann: CANN release in the vendor's spelling, ``None`` if unknown.
    """
    number = _release(torch_npu)
    if number is None or torch_npu is None:
        return
    # 2.7.1.post2 is for torch 2.7.1: the first three numbers must be equal.
    if torch is not None and _release(torch) not in (None, number):
        what = f"it was built for another torch than {torch}, whose C++ interfaces differ"
        yield Finding("error", f"torch_npu {torch_npu}", what, _advice(torch, cann))
        return
    if cann is None or (series := _series(cann)) is None:
        return
    release, listed = release_of(torch_npu), [each for _, canns in _TOGETHER for each in canns]
    if release is None:
        newest = max(RELEASES[-1].torch_npu, key=Version)
        # A torch newer than the tables cover, with a CANN that they cover.
        if number > Version(newest).release and series in listed:
            what = f"the vendor's table pairs CANN {cann} with older ones; the newest of it is {newest}"
            yield Finding("warning", f"torch_npu {torch_npu}", what, _advice(torch, cann))
        return
    served = compatible(release)
    if series in listed and series not in served:
        what = f"it is of release {release.name} for CANN {release.cann}, and CANN {cann} is installed"
        also = "" if len(served) == 1 else f"; the vendor calls CANN {', '.join(served)} compatible with it"
        do = f"{_advice(torch, cann)}, or install CANN {release.cann}"
        yield Finding("error", f"torch_npu {torch_npu}", what + also, do)


def _advice(torch: str | None, cann: str | None) -> str:
    """Return installation advice: a torch_npu for this torch and, if known, this CANN."""
    series = None if cann is None else _series(cann)
    release = next((each for each in RELEASES if series == _series(each.cann)), None)
    if release is None:
        # No release was published with this CANN: take the newest that is compatible with it.
        for releases, canns in _TOGETHER:
            release = releases[-1] if series in canns else release
    own = ".".join(map(str, _release(torch) or ()))
    if release is None:
        return f"pip install --no-deps 'torch_npu=={own}.*'"
    if torch is not None and (wheel := release.wheel(torch)) is not None:
        return f"pip install --no-deps torch_npu=={wheel}"
    *most, last = release.torch_npu
    pairs = f"{', '.join(most)} or {last}" if most else last
    return f"install torch_npu {pairs} with the torch of its number"


def _series(cann: str) -> str | None:
    """Return the series of a CANN release: ``8.3`` for ``8.3.RC1``."""
    found = _SERIES.match(cann)
    return None if found is None else ".".join(found.groups())


def _release(text: str | None) -> tuple[int, ...] | None:
    """Return the first three numbers of a torch or torch_npu version, which name the torch release."""
    found = parsed(text)
    return None if found is None else found.release[:3]
