"""``--use-fused-swiglu``: the activation of MLPs, experts and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.operators.selection import (
    FUSED_OPERATORS,
    check_library,
    check_selection,
    is_named,
    selects,
)
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """What else is asked for.

    Attributes:
        apart: each expert's activation is recomputed by itself.
    """

    apart: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        return cls(apart=bool(getattr(settings, "recompute_activation_function", False)))


_SWITCH = "use_fused_swiglu"


def check_swiglu(args: Any, options: Any) -> Iterator[str]:
    """What in a job's arguments does not go with a fused SwiGLU."""
    yield from check_selection(args, "swiglu", _SWITCH)
    yield from check_library("swiglu")
    if not is_named(args, "swiglu", _SWITCH):
        return
    if argument(args, "swiglu") is False:
        yield (
            "a fused SwiGLU needs --swiglu, and the model has another activation; add it, or drop swiglu "
            "from the fused operators"
        )
    if argument(args, "use_te_activation_func"):
        yield (
            "a fused SwiGLU and --use-te-activation-func are two kernels for the same activation; drop one "
            "of them"
        )


_ROOM = "mindspeed_dsa.features.operators.swiglu"
_IMPL = f"{_ROOM}.activation"
_FUSIONS = "megatron.core.fusions.fused_bias_swiglu"

FEATURE = Feature(
    name="fused-swiglu",
    summary="SwiGLU, with a bias or weighted by a router's probabilities, is one operator forward and one "
    "backward, and keeps its input alone.",
    flags=(Flag("--use-fused-swiglu", "Fuse SwiGLU."), FUSED_OPERATORS),
    patches=(
        Patch(
            f"{_FUSIONS}:bias_swiglu_impl",
            "wrap",
            f"{_IMPL}:fuse_swiglu",
            "its backward is more than a dozen operations unless a compiler fuses them",
            params=("input", "bias", "fp8_input_store"),
            versions=releases.SERVED,
        ),
        Patch(
            f"{_FUSIONS}:weighted_bias_swiglu_impl",
            "wrap",
            f"{_IMPL}:fuse_weighted_swiglu",
            "its backward is more than a dozen operations unless a compiler fuses them",
            params=("input", "bias", "weights", "fp8_input_store"),
            versions=releases.SERVED,
        ),
        Patch(
            "megatron.core.transformer.mlp:MLP.forward",
            "wrap",
            f"{_IMPL}:fuse_in_mlp",
            "without Megatron's own fusion backward keeps the results of three operations",
            params=("hidden_states", "per_token_scale"),
            versions=releases.SERVED,
            priority=-1,  # inside of what runs the forward in part, or knows the module by its identity
        ),
        Patch(
            "megatron.core.transformer.moe.experts:SequentialMLP.forward",
            "wrap",
            f"{_ROOM}.experts:activate_together",
            "every expert has an activation of its own, of a few rows",
            params=("permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"),
            versions=releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=selects("swiglu", "use_fused_swiglu"),
    options=Options.of,
    check=check_swiglu,
    doc="fused-operators.md",
)
