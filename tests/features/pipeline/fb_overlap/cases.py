"""Training steps with paired forwards and backwards; runs in the pool's workers."""

from __future__ import annotations

from typing import Any

from tests.features.moe.alltoall_overlap.cases import recorded
from tests.support import model


def trained(**arguments: Any) -> dict[str, Any]:
    """A training step of the tiny model, with the launches and waits of its parted transfers."""
    with recorded() as events:
        result = model.run(**arguments)
    return {**result, "events": list(events)}
