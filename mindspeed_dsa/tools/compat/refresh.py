"""Update of the record of patch targets from Megatron's releases, whose wheels are downloaded and cached."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.drift import Checker, TargetFacts
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.patches.source_tree import SourceTree
from mindspeed_dsa.session.records import (
    MAIN,
    RELEASES,
    ROOT,
    Development,
    Records,
    megatron_patches,
    needed_parameters,
    recorded,
)


def refresh(previous: Records, wheel_folder: Path | None = None, clone: Path | None = None) -> Records:
    """Return a new record: every patch target, inspected in the sources of every recorded release.

    Args:
        previous: existing record, used if a release's sources do not have the target's package: wheels up to
            0.16 have no ``megatron.training``.
        wheel_folder: folder that keeps wheels; by default the user's cache.
        clone: clone of Megatron-LM with tags ``core_v<release>``, for packages missing in wheels, and with
            branch ``main``, which is recorded, too.
    """
    targets = {patch.label: patch for _, patch in megatron_patches()}
    needed = needed_parameters(feature for feature, _ in megatron_patches())
    facts: dict[str, dict[str, TargetFacts]] = {target: {} for target in targets}
    branch = None if clone is None else _branch(clone)
    main = previous.main if clone is None or branch is None else _commit(clone, branch)
    for release in (*RELEASES, *([MAIN] if main else [])):
        trees = []
        if release != MAIN:
            trees.append(SourceTree.archive(fetch(release, wheel_folder), label="this release"))
        ref = branch if release == MAIN else f"core_v{release}"
        # If the wheel has the training code, the clone's tag is not needed; some releases have no tag.
        if clone is not None and ref and not any(tree.holds("megatron.training") for tree in trees):
            trees.append(_sources(clone, ref))
        version = main.version if main and release == MAIN else release
        checkers = [Checker(tree, version, root=ROOT) for tree in trees]
        for target, patch in targets.items():
            package = ".".join(patch.module.split(".")[:2])  # megatron.core, megatron.training
            holding = [checker for checker in checkers if checker.tree.holds(package)]
            if not holding and clone is not None and checkers:
                holding = checkers[-1:]  # all sources were read, so this release does not have the package
            found = holding[0].inspect(patch) if holding else previous.of(patch, release)
            if found is not None:
                facts[target][release] = recorded(found, needed[target])
    return Records(facts, main)


def _branch(clone: Path) -> str | None:
    """Return the newest ref of ``main``; the local branch may be older than the remote one."""
    names = (f"refs/heads/{MAIN}", f"refs/remotes/origin/{MAIN}")
    newest = _git(clone, "for-each-ref", "--sort=-committerdate", "--count=1", "--format=%(refname)", *names)
    return newest.stdout.decode().strip() or None


def _commit(clone: Path, ref: str) -> Development:
    """Return the last commit of branch ``ref`` in a clone of Megatron-LM."""
    commit, date = _git(clone, "log", "-1", "--format=%H %cs", ref).stdout.decode().split()
    text = _git(clone, "show", f"{ref}:{ROOT}/core/package_info.py").stdout.decode()
    version = versions.version_in_source(text)
    if version is None:
        raise MindSpeedDSAError(f"mindspeed_dsa: {ref} in {clone} declares no release in package_info.py")
    return Development(version, commit, date)


def _sources(clone: Path, ref: str) -> SourceTree:
    """Return Megatron's source tree at tag or branch ``ref`` of a clone of Megatron-LM."""
    done = _git(clone, "archive", "--format=zip", ref, ROOT)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise MindSpeedDSAError(
            f"mindspeed_dsa: cannot read {ref} in {clone} ({said}); fetch Megatron-LM's tags into it"
        )
    return SourceTree.archive(io.BytesIO(done.stdout), label="this release")


def _git(clone: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, check=False)


# -- wheels -------------------------------------------------------------------------------------

# Wheels are built per interpreter, and old releases lack new interpreters. Python files do not differ.
_INTERPRETERS = ("3.12", "3.11", "3.10")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "any")


def cache_folder() -> Path:
    """Return the folder that keeps fetched wheels between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mindspeed_dsa" / "wheels"


def fetch(release: str, folder: Path | None = None) -> Path:
    """Return the wheel of a Megatron-core release, downloaded once.

    Raises:
        MindSpeedDSAError: pip cannot download it; the message includes pip's message.
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
