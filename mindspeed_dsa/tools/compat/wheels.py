"""Released Megatron-core wheels: fetched with pip, read, never installed or imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mindspeed_dsa.patches.errors import MindSpeedDSAError

# Wheels are built per interpreter, and old releases lack new ones; their Python files are the same.
_INTERPRETERS = ("3.12", "3.11", "3.10")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "any")


def cache_folder() -> Path:
    """Where fetched wheels are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mindspeed_dsa" / "wheels"


def fetch(release: str, folder: Path | None = None) -> Path:
    """The wheel of a Megatron-core release, downloaded once.

    Raises:
        MindSpeedDSAError: pip cannot download it; the message includes pip's own.
    """
    folder = folder or cache_folder()
    for interpreter in _INTERPRETERS:
        present = sorted(folder.glob(f"megatron_core-{release}-*.whl"))
        if present:
            return present[0]
        folder.mkdir(parents=True, exist_ok=True)
        said = _download(release, interpreter, folder)
    present = sorted(folder.glob(f"megatron_core-{release}-*.whl"))
    if present:
        return present[0]
    last = (said.strip().splitlines() or ["no message"])[-1]
    raise MindSpeedDSAError(
        f"mindspeed_dsa: pip cannot fetch a wheel of megatron-core {release} ({last}); name a release that "
        "`pip index versions megatron-core` lists, or the path of a wheel or a checkout"
    )


def _download(release: str, interpreter: str, folder: Path) -> str:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--implementation", "cp"]
    command += ["--python-version", interpreter, "--dest", str(folder)]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run(
        [*command, f"megatron-core=={release}"], capture_output=True, text=True, check=False
    )
    return done.stderr
