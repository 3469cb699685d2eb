"""Reads releases of Megatron again and writes the record."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

from mindspeed_dsa.compat import wheels
from mindspeed_dsa.compat.records import RELEASES, ROOT, Records, megatron_patches
from mindspeed_dsa.patches.drift import Checker, TargetFacts
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.patches.source_tree import SourceTree


def refresh(previous: Records, wheel_folder: Path | None = None, clone: Path | None = None) -> Records:
    """Facts about every target of every feature in every recorded release.

    Args:
        previous: kept where a release's sources do not hold the target's package: wheels up to 0.16
            have no ``megatron.training``.
        wheel_folder: where wheels are kept; by default the user's cache.
        clone: a clone of Megatron-LM with its tags ``core_v<release>``, for packages that are not in wheels.
    """
    targets = {patch.label: patch for _, patch in megatron_patches()}
    facts: dict[str, dict[str, TargetFacts]] = {target: {} for target in targets}
    for release in RELEASES:
        trees = [SourceTree.archive(wheels.fetch(release, wheel_folder), label="this release")]
        if clone is not None:
            trees.append(_tag(clone, release))
        checkers = [Checker(tree, release, root=ROOT) for tree in trees]
        for target, patch in targets.items():
            package = ".".join(patch.module.split(".")[:2])  # megatron.core, megatron.training
            holding = [checker for checker in checkers if checker.tree.holds(package)]
            if not holding and clone is not None:
                holding = checkers[-1:]  # the whole release was read: the package is not part of it
            found = holding[0].inspect(patch) if holding else previous.of(patch, release)
            if found is not None:
                facts[target][release] = found
    return Records(facts)


def _tag(clone: Path, release: str) -> SourceTree:
    """All of Megatron as tagged for a release."""
    tag = f"core_v{release}"
    done = subprocess.run(
        ["git", "-C", str(clone), "archive", "--format=zip", tag, ROOT], capture_output=True, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise MindSpeedDSAError(
            f"mindspeed_dsa: cannot read {tag} in {clone} ({said}); fetch Megatron-LM's tags into it"
        )
    return SourceTree.archive(io.BytesIO(done.stdout), label="this release")
