"""The record of released Megatron-core versions, and the checks that use it.

``targets.json`` in this folder is written by ``make compat``; nothing here imports Megatron or
torch. Cheap to import: the record is read, and the code that reads sources loaded, when the first
patch is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from mindspeed_dsa.patches import versions

if TYPE_CHECKING:
    from mindspeed_dsa.patches.drift import Checker
    from mindspeed_dsa.patches.spec import Patch


def checker(root: str = "megatron") -> Checker:
    """Checks patches against the installed sources of Megatron, or of the fork ``root``."""
    from mindspeed_dsa.patches.drift import Checker
    from mindspeed_dsa.patches.source_tree import SourceTree
    from mindspeed_dsa.tools.compat import records

    known = records.load().fingerprints()
    return Checker(SourceTree.installed(), versions.of_megatron(root), known, root)


def static_check(root: str = "megatron") -> Callable[[Patch], tuple[list[str], list[str]]]:
    """The patch manager's look at sources: ``patch -> (problems, notes)``."""
    checker_once = cache(lambda: checker(root))
    return lambda patch: checker_once()(patch)
