"""Megatron's schedule of pairs, switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.pipeline.fb_overlap.feature import Options, check_overlap
from mindspeed_dsa.megatron import configuration


def switch_on_paired_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``validate_args``: what a job's own code and Megatron read is the argument."""

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        args.overlap_moe_expert_parallel_comm = True
        return original(args, *rest, **kwargs)

    return validate_args


def configure_paired_schedule(
    original: Callable[..., None], context: Context[Options]
) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``: of a model with experts.

    Its own checks of the schedule, one of which is against fp32, are passed over; ours take their place.
    """

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.num_moe_experts is None:
            original(self, *args, **kwargs)
            return
        configuration.require(context, check_overlap, self)
        self.overlap_moe_expert_parallel_comm = False
        original(self, *args, **kwargs)
        self.overlap_moe_expert_parallel_comm = True

    return __post_init__
