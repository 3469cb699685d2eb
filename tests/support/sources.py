"""Sessions of one process look at the same sources again and again: they are parsed once."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable

from mindspeed_dsa.patches import drift, source_tree


def parse_once() -> None:
    """Keep what was parsed and fingerprinted for as long as the process lives."""
    if hasattr(source_tree.scope_of_text, "cache_info"):
        return
    source_tree.scope_of_text = functools.lru_cache(maxsize=256)(source_tree.scope_of_text)
    compute = drift.fingerprint
    known: dict[tuple[object, ...], tuple[list[ast.AST], str]] = {}

    def fingerprint(nodes: Iterable[ast.AST], rename: tuple[str, str] | None = None) -> str:
        nodes = list(nodes)
        key = (*map(id, nodes), rename)
        if key not in known:
            known[key] = nodes, compute(nodes, rename)  # with the nodes, whose addresses stay taken
        return known[key][1]

    drift.fingerprint = fingerprint
