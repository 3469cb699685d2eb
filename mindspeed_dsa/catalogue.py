"""Everything that is declared to patch Megatron: the features, and the session's own services."""

from __future__ import annotations

from mindspeed_dsa.declarations import Feature
from mindspeed_dsa.features import all_features
from mindspeed_dsa.integration.job import SERVICES


def everything() -> tuple[Feature, ...]:
    """For pages, records and checks that cover each patched symbol."""
    return (*all_features(), *SERVICES)
