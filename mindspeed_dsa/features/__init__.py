"""Feature registry: every feature, in the order in which their wrappers nest.

Built-in features come first, then plug-ins (entry points of the group ``mindspeed_dsa.features``,
sorted by distribution name), then those registered from code.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.third_party import Plugin, read
from mindspeed_dsa.megatron.job import SERVICES
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.settings import GENERAL_FLAGS

ENTRY_POINTS = "mindspeed_dsa.features"
"""Entry point group in which plug-ins declare their features."""

KINDS = {
    "platform": "Redirections that Megatron needs to run on a platform",
    "dsa": "DeepSeek Sparse Attention: fused operators, repairs of Megatron's own, older releases served",
    "attention": "Other attention: context parallelism, packed documents, sequence-tensor parallelism",
    "memory": "Activations recomputed or swapped, optimizer state on the host, weights in one storage",
    "tensor_parallel": "Tensor parallel communication hidden behind matmul",
    "moe": "Mixture of experts",
    "data_parallel": "Parameters, gradients and optimizer state sharded over data parallel ranks",
    "pipeline": "Pipeline schedules",
    "operators": "Small operators of a layer, each as one",
    "compilation": "Parts of a layer compiled",
    "checkpoints": "Weights of other formats, read and written",
    "data": "Samples of a job, and which of their tokens count in the loss",
    "diagnostics": "Records of a job, which change nothing in its training",
}
"""Folders of features, with a description. Wrappers of one target nest in this order, and within a kind by
folder name. Patches that need another order set ``priority``."""

_registered: list[Feature] = []


def register(feature: Feature) -> Feature:
    """Add a feature; it gets flags, checks, doctor and undo like the built-in ones.

    Raises:
        SettingsError: a feature of this name exists.
    """
    if any(known.name == feature.name for known in all_features()):
        raise SettingsError(f"a feature named {feature.name!r} exists already; give yours another name")
    # Names identify features in flags, conflicts and requirements, so they are unique.
    _registered.append(feature)
    return feature


def unregister(name: str) -> None:
    """Remove a registered feature."""
    _registered[:] = [feature for feature in _registered if feature.name != name]


def all_features() -> tuple[Feature, ...]:
    """Return built-in, plug-in and registered features; imports neither torch nor Megatron."""
    from_plugins = (feature for plugin in plugins() if not plugin.problem for feature in plugin.features)
    return (*built_in(), *from_plugins, *_registered)


@cache
def plugins() -> tuple[Plugin, ...]:
    """Return the installed plug-ins, including broken ones; read once per process."""
    return read(ENTRY_POINTS, (*built_in(), *SERVICES, *_registered), GENERAL_FLAGS)


def broken_plugins() -> list[Plugin]:
    """Return the plug-ins that cannot be used."""
    return [plugin for plugin in plugins() if plugin.problem]


@cache
def by_kind() -> dict[str, tuple[Feature, ...]]:
    """Return the features by kind, collected from every ``feature.py`` in the kind's folder."""
    here = Path(__file__).parent
    kinds: dict[str, tuple[Feature, ...]] = {}
    for kind in KINDS:
        # A feature is found by its file, so no list has to be kept up to date.
        files = (here / kind).rglob("feature.py")
        # Sorted by folder name, which fixes the order of wrappers.
        modules = sorted(".".join(file.relative_to(here).with_suffix("").parts) for file in files)
        kinds[kind] = tuple(feature for module in modules for feature in declared_in(f"{__name__}.{module}"))
    return kinds


@cache
def built_in() -> tuple[Feature, ...]:
    """Return the features of all kinds, in the order in which their wrappers nest."""
    return tuple(feature for features in by_kind().values() for feature in features)


def declared_in(name: str) -> tuple[Feature, ...]:
    """Return the features that a module defines, in order."""
    return tuple(value for value in vars(import_module(name)).values() if isinstance(value, Feature))


def switch_of(feature: Feature) -> str:
    """Return the flag that switches a feature on, or ``automatic`` if the job's other settings do."""
    if not feature.flags or feature.when:
        return "automatic"
    switch = feature.flags[0]
    if switch.megatron:
        return f"{switch.name} (Megatron's)"
    if switch.kind == "bool":
        # A feature that its own flag cannot switch on depends on other settings.
        alone = {flag.dest: flag.unset for flag in feature.flags} | {switch.dest: True}
        if not feature.is_active(SimpleNamespace(**alone, platform="cuda", features_on=())):
            return "automatic"
    return switch.name + (", automatic" if switch.kind == "auto" and switch.unset is None else "")


def all_flags() -> list[Flag]:
    """Return the flags of all features without duplicates, including Megatron's flags that they read."""
    by_dest: dict[str, Flag] = {}
    for feature in all_features():
        for flag in feature.flags:
            by_dest.setdefault(flag.dest, flag)
    return list(by_dest.values())


def everything() -> tuple[Feature, ...]:
    """Return all features and services, for commands that cover every patched symbol."""
    return (*all_features(), *SERVICES)


def shipped() -> tuple[Feature, ...]:
    """Return the features and services of this library without plug-ins, for its pages and records."""
    return (*built_in(), *SERVICES)
