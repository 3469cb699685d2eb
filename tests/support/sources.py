"""Caches of sources: each process parses and checks each source only once."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mindspeed_dsa import features
from mindspeed_dsa.patches import drift, source_tree
from mindspeed_dsa.session import checks


def tree_of(file: Path) -> ast.Module:
    """Return the parsed source of a file, for all tests that read it; nobody may change the tree."""
    state = file.stat()
    return _tree_of(file, state.st_mtime_ns, state.st_size)


@functools.cache
def _tree_of(file: Path, mtime_ns: int, size: int) -> ast.Module:
    gc.disable()  # a tree is no garbage, and looking for some takes twice as long as parsing
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    finally:
        gc.enable()


def nodes_of(file: Path) -> list[ast.AST]:
    """Return all nodes of a file's tree, in the order of ``ast.walk``."""
    return _nodes_of(tree_of(file))


@functools.cache
def _nodes_of(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def parse_once() -> None:
    """Cache parsed sources, fingerprints and checks of patches for the life of the process."""
    if hasattr(source_tree.scope_of_text, "cache_info"):
        return
    source_tree.scope_of_text = functools.lru_cache(maxsize=256)(source_tree.scope_of_text)
    compute = drift.fingerprint
    known: dict[tuple[object, ...], tuple[list[ast.AST], str]] = {}

    def fingerprint(nodes: Iterable[ast.AST], rename: tuple[str, str] | None = None) -> str:
        nodes = list(nodes)
        key = (*map(id, nodes), rename)
        if key not in known:
            # Keep the nodes alive, so that their addresses are not reused.
            known[key] = nodes, compute(nodes, rename)
        return known[key][1]

    drift.fingerprint = fingerprint
    static_check = checks.static_check
    found: dict[object, Callable[[Any], Any]] = {}

    def check_once(root: str = "megatron") -> Callable[[Any], Any]:
        # Sources depend on the path: a fork that a test writes has its own folder.
        where = root, *sys.path, *map(id, source_tree._finders())
        if where not in found:
            found[where] = functools.cache(static_check(root))
        return found[where]

    checks.static_check = check_once


def check_all() -> None:
    """Check all patches, so that processes forked from this one inherit the results."""
    check = checks.static_check()
    for feature in features.all_features():
        for patch in feature.patches:
            with contextlib.suppress(Exception):  # a case that arms it will report it
                check(patch)
