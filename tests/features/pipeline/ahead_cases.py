"""A training step with full or selective recompute, in place and ahead; runs in the pool's workers."""

from __future__ import annotations

from typing import Any

from tests.support import model


def run(flag: str, layout: dict[str, int], recompute: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """The step's result, and what was recomputed ahead of its gradient and in place."""
    from mindspeed_dsa.features.pipeline.recompute_ahead import ahead

    overrides = {**recompute, **arguments.pop("overrides", {})}
    result = model.run({flag: True} if flag else {}, overrides=overrides, **arguments, **layout)
    counts = [each.recomputed for each in ahead._followers.values()]
    return {**result, "recomputed": counts[0] if counts else None}
