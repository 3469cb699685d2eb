"""The load of MoE experts in the log."""

from __future__ import annotations

from dsa_router_load.options import Options
from dsa_router_load.validation import check_router_load
from mindspeed_dsa import Feature, Flag, Patch, Requires

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
            "its routing map says how many tokens each expert gets",
            params=("input",),
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.12.1,<0.20"}),
    options=Options.of,
    validate=check_router_load,
)
