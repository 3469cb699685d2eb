"""The module whose classes make up DSA: Megatron's own, or ours where Megatron has none."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from packaging.specifiers import SpecifierSet

from mindspeed_dsa import versions
from mindspeed_dsa.features.host import current_root, host

WITHOUT_DSA = "<0.16"
"""Releases of Megatron-core that have no DSA."""


def dsa_module() -> ModuleType:
    """Has ``DSAIndexer``, ``DSAttention``, ``DSAIndexerLossAutoScaler`` and the rest, under those names."""
    if _is_brought_along(current_root()):
        return import_module("mindspeed_dsa.features.attention.bring_along.dsa")
    return host("core.transformer.experimental_attention_variant.dsa")


@cache
def _is_brought_along(root: str) -> bool:
    release = versions.of_megatron(root)
    return release is not None and SpecifierSet(WITHOUT_DSA, prereleases=True).contains(release)
