"""The registry: every feature there is, in the order in which their wrappers stack."""

from __future__ import annotations

from importlib import import_module

from mindspeed_dsa.features.base import Feature, Flag
from mindspeed_dsa.patches.errors import SettingsError

_DECLARATIONS: tuple[str, ...] = (
    "platform.cpu",
    "platform.p2p_ordering",
    "platform.optimizer_resume",
    "attention.spec_dispatch",
    "attention.local_provider",
    "attention.hadamard",
    "attention.loss_scale",
    "attention.loss_gate",
    "attention.recompute",
    "attention.loss_tracker",
    "attention.indexer_tp_grads",
    "attention.rotary_key_tp_grads",
    "attention.rope_first",
    "attention.normalised_query",
    "attention.bring_along.feature",
    "attention.fused.declare",
    "attention.fused.kernel_declare",
    "memory.reuse_fp32_param",
    "memory.swap_optimizer",
    "memory.virtual_optimizer",
    "memory.recompute",
    "memory.swap_attention",
    "tensor_parallel.overlap",
    "training.metrics",
    "training.initial_weights",
    "training.arguments",
    "training.verify",
)
"""Modules below this package that declare ``FEATURES``."""

_registered: list[Feature] = []


def register(feature: Feature) -> Feature:
    """Add a feature of your own; it gets flags, checks, doctor and undo like the built-in ones.

    Raises:
        SettingsError: the name is taken.
    """
    if any(known.name == feature.name for known in all_features()):
        raise SettingsError(f"a feature named {feature.name!r} exists already; give yours another name")
    _registered.append(feature)
    return feature


def unregister(name: str) -> None:
    """Take a registered feature away again."""
    _registered[:] = [feature for feature in _registered if feature.name != name]


def all_features() -> tuple[Feature, ...]:
    """Built-in features and registered ones; imports neither torch nor Megatron."""
    declared: list[Feature] = []
    for name in _DECLARATIONS:
        declared += import_module(f"{__name__}.{name}").FEATURES
    companions = [feature for feature in declared if feature.companion]
    return (*(f for f in declared if not f.companion), *_registered, *companions)


def all_flags() -> list[Flag]:
    """Flags of all features, host flags included, each once."""
    found: dict[str, Flag] = {}
    for feature in all_features():
        for flag in feature.flags:
            found.setdefault(flag.dest, flag)
    return list(found.values())
