"""A training step with full or selective recompute, in place and ahead; runs in the pool's workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from tests.support import model
from tests.support.contexts import running


def run(
    flag: str,
    layout: dict[str, int],
    recompute: dict[str, Any],
    frozen: str = "",
    trace: str = "",
    norms: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """The step's result, and what was recomputed ahead of its gradient and in place.

    Args:
        flag: switch that is on, if any.
        layout: of the ranks.
        recompute: Megatron's own settings.
        frozen: module of each chunk that does not learn.
        trace: folder for a record of the step, which is followed twice then.
        norms: outputs of norms are recomputed, too.
        **arguments: of :func:`model.run`.
    """
    from mindspeed_dsa.features.pipeline.recompute_ahead.ahead import Ahead

    overrides = {**recompute, **arguments.pop("overrides", {})}
    with mock.patch.object(model, "gpt_model", partial(_frozen, model.gpt_model, frozen)):
        switches: dict[str, Any] = {flag: True} if flag else {}
        if norms:
            switches["recompute_norm"] = True
        if trace:
            switches |= {"trace_schedule": trace, "trace_schedule_step": 1}
        result = model.run(switches, overrides=overrides, **arguments, **layout)
    context = running("recompute-ahead")
    return {**result, "recomputed": context.state(Ahead).recomputed if context else None}


def _frozen(build: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    built = build(*args, **kwargs)
    module = getattr(built, name, None) if name else None
    if module is not None:
        module.requires_grad_(False)
        for parameter in module.parameters():
            parameter.main_grad = parameter.detach()  # data parallelism gives it none
    return built
