"""Training steps of models whose layers share selections; they run inside the pool's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

from packaging.version import Version

from mindspeed_dsa.features.dsa.shared_selections import selection
from mindspeed_dsa.patches import versions
from tests.matrix import steps

LAYERS = 8
MODEL = {"num_layers": LAYERS, "moe_layer_freq": [0, 1] * (LAYERS // 2)}


def _communication(cp: int = 1, **others: Any) -> dict[str, Any]:
    """From 0.19 on context parallel DSA has to be told how keys travel."""
    return (
        {"cp_comm_type": "allgather"}
        if cp > 1 and Version(str(versions.of_megatron())) >= Version("0.19")
        else {}
    )


def step(
    switches: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Run :func:`steps.step`, and tell how many selections were handed on, and what is left of them."""
    with mock.patch.object(
        selection.Selections, "store", autospec=True, side_effect=selection.Selections.store
    ) as stored:
        result = steps.step(
            switches, {**MODEL, **_communication(**arguments), **(overrides or {})}, **arguments
        )
    return {**result, "selected": stored.call_count, "left": selection.current().latest}
