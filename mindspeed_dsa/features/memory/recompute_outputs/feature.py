"""The checkpoint that outputs are recomputed with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory.recompute_checks import check_precision_and_graphs
from mindspeed_dsa.features.memory.switches import any_of, wanted
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        verify: compare recomputed bytes with those of the forward.
    """

    verify: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(verify=bool(getattr(settings, "recompute_verify", False)))


_NEED_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "gdn_norm_out", "gdp_qkv")
"""Modules whose checkpoint Megatron constructs without saying that there is no fp8, from 0.14 on."""


def recomputes_without_engine(settings: Any) -> bool:
    """Whether modules of Megatron are recomputed with its checkpoint, which does not run here.

    With Transformer Engine it runs, in fp8 too, and is left as it is.
    """
    return bool(_modules(settings)) and find_spec("transformer_engine") is None


def _modules(settings: Any) -> list[str]:
    modules = getattr(settings, "recompute_modules", None) or ()
    return [name for name in _NEED_TRANSFORMER_ENGINE if name in modules]


def check_outputs(args: Any, options: Options) -> Iterator[str]:
    """Problems of ``--recompute-verify`` where it is used with Megatron's own modules alone."""
    if argument(args, "recompute_verify"):
        yield from check_precision_and_graphs(args, "--recompute-verify")
    elif recomputes_without_engine(args) and argument(args, "recompute_granularity") == "selective":
        modules = " ".join(_modules(args))
        yield from check_precision_and_graphs(
            args, f"--recompute-modules {modules} without Transformer Engine"
        )


FEATURE = Feature(
    name="recompute-outputs",
    summary="The checkpoint without output that both of these, and Megatron's own modules, recompute with: "
    "works without Transformer Engine, restores random states only where they are drawn from, verifies.",
    flags=(
        Flag(
            "--recompute-verify",
            "Keep a host copy of every output that is recomputed, and fail where the recomputed bytes "
            "differ. For debugging.",
        ),
        Flag("--recompute-modules", "Megatron's own flag.", kind="value", nargs="*", megatron=True),
    ),
    patches=(
        Patch(
            "megatron.core.tensor_parallel:CheckpointWithoutOutput",
            "value",
            "mindspeed_dsa.features.memory.recompute_outputs.megatron_checkpoint:checkpoint_without_output",
            "Megatron's needs Transformer Engine even without fp8, and copies random states every time",
            versions=releases.SERVED,
            factory=True,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=any_of(
        wanted("recompute_activation_function", "recompute_activation_function_num_layers"),
        wanted("recompute_norm", "recompute_norm_num_layers"),
        wanted("recompute_verify"),
        recomputes_without_engine,
    ),
    options=Options.of,
    check=check_outputs,
    doc="recompute-outputs.md",
)
