"""Backwards in halves: the same bits, weight gradients where the list has them, no more waiting than said."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.schedule import beside
from tests.support import model
from tests.support.contexts import running
from tests.support.model import losses_of

# -- what runs in the pool's workers ---------------------------------------------------------------


def run(
    switches: dict[str, Any],
    layout: dict[str, int],
    frozen: str = "",
    **arguments: Any,
) -> dict[str, Any]:
    """The step's result, and what waited.

    Args:
        switches: that are on.
        layout: of the ranks.
        frozen: module of each chunk that does not learn.
        **arguments: of :func:`model.run`.
    """
    from mindspeed_dsa.features.pipeline.split_backward.playing import Player

    with mock.patch.object(model, "gpt_model", partial(_frozen, model.gpt_model, frozen)):
        result = model.run(switches, **arguments, **layout)
    context = running("split-backward")
    waiting = context.state(Player).waiting if context else None
    waited = (waiting.most_units, waiting.most_bytes) if waiting else None
    return {**result, "waited": waited}


def _frozen(build: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    built = build(*args, **kwargs)
    module = getattr(built, name, None) if name else None
    if module is not None:
        module.requires_grad_(False)
        for parameter in module.parameters():
            parameter.main_grad = parameter.detach()  # data parallelism gives it none
    return built


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2000}
CASES: dict[str, tuple[int, dict[str, int], int, dict[str, Any]]] = {
    # name: ranks, layout, layers, more arguments
    "PP2": (2, {"pp": 2}, 2, {}),
    "PP2, overlapped reduction": (2, {"pp": 2}, 2, {"ddp": OVERLAP}),
    "PP2 x VPP2": (2, {"pp": 2, "vpp": 2}, 4, {}),
    "PP2 x VPP2, overlapped reduction": (2, {"pp": 2, "vpp": 2}, 4, {"ddp": OVERLAP}),
    "PP2, recomputed": (2, {"pp": 2}, 2, {"overrides": FULL}),
    "PP2, frozen": (2, {"pp": 2}, 2, {"frozen": "embedding"}),
    "PP2 x TP2+SP": (4, {"pp": 2, "tp": 2}, 2, {}),
    "PP2 x TP2": (4, {"pp": 2, "tp": 2}, 2, {"sequence_parallel": False, "overrides": model.WITHOUT_EXPERTS}),
    "PP2 x EP2": (4, {"pp": 2, "ep": 2}, 2, {}),
    "PP4": (4, {"pp": 4}, 4, {"num_microbatches": 6}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_in_the_order_of_the_list(pool, name, tmp_path):
    ranks, layout, layers, more = CASES[name]
    run_step = partial(
        pool.run,
        "tests.features.pipeline.test_split_backward:run",
        ranks,
        layout=layout,
        overrides={
            "num_layers": layers,
            **(model.WITHOUT_EXPERTS if "dense" in more else {}),
            **more.get("overrides", {}),
        },
        num_microbatches=more.get("num_microbatches", 4),
        micro_batch_size=1,
        frozen=more.get("frozen", ""),
        ddp=more.get("ddp"),
        sequence_parallel=more.get("sequence_parallel", True),
    )
    stock = run_step(switches=more.get("switches", {}))
    split = {"split_backward": True, **more.get("switches", {})}
    ours = run_step(switches={**split, "trace_schedule": str(tmp_path), "trace_schedule_step": 1})
    for mine, theirs in zip(ours, stock, strict=True):
        assert losses_of(mine) == losses_of(theirs)
        assert mine["gradients"].keys() == theirs["gradients"].keys()
        different = [
            key for key, gradient in theirs["gradients"].items() if not mine["gradients"][key].equal(gradient)
        ]
        assert different == []
    found = beside.compare(Path(tmp_path), Megatron())
    assert found.other_order == []
    assert all(units > 0 and size > 0 for units, size in (rank["waited"] for rank in ours))
