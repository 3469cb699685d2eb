"""Declaration of router-load: the load of MoE experts in the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa import Feature, Flag, Patch, Requires


@dataclass(frozen=True)
class Options:
    """Options of router-load.

    Attributes:
        interval: number of a layer's forward passes per line of the log.
    """

    interval: int

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Read the options from resolved settings."""
        return cls(interval=settings.router_load_interval)


def check_router_load(args: Any, options: Options) -> Iterator[str]:
    """Yield every problem of a job's arguments; arguments that a job lacks are not judged."""
    if getattr(args, "num_experts", 1) is None:
        yield "--log-router-load: a model without experts has no router; add --num-experts or omit it"
    if options.interval < 1:
        yield f"--router-load-interval {options.interval}: use at least 1"


FEATURE = Feature(
    name="router-load",
    summary="Logs how unevenly each MoE router loads its experts.",
    flags=(
        Flag("--log-router-load", "Log how unevenly each MoE router loads its experts."),
        Flag(
            "--router-load-interval",
            "Forward passes of a layer, one per microbatch, from one line of the log to the next.",
            kind="value",
            type=int,
            default=100,
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.moe.router:TopKRouter.forward",
            "wrap",
            "dsa_router_load.router:log_load",
            "the routing map that the router returns says how many tokens each expert gets",
            params=("input",),
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.12.1,<0.20"}),
    options=Options.of,
    check=check_router_load,
)
