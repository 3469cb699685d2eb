"""All declarations that patch Megatron: the features, and the session's own services."""

from __future__ import annotations

from mindspeed_dsa.declarations import Feature
from mindspeed_dsa.features import all_features, built_in
from mindspeed_dsa.integration.job import SERVICES


def everything() -> tuple[Feature, ...]:
    """For commands that cover each patched symbol: plug-ins included."""
    return (*all_features(), *SERVICES)


def shipped() -> tuple[Feature, ...]:
    """Features that this library ships, without plug-ins; for its pages and records."""
    return (*built_in(), *SERVICES)
