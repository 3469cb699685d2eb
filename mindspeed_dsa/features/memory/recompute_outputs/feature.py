"""The checkpoint that outputs are recomputed with."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory.recompute_outputs.options import Options
from mindspeed_dsa.features.memory.recompute_outputs.validation import (
    check_outputs,
    recomputes_without_engine,
)
from mindspeed_dsa.features.memory.switches import any_of, wanted
from mindspeed_dsa.megatron import configuration, releases
from mindspeed_dsa.patches.spec import Patch

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
    validate=configuration.validate(check_outputs, Options.of),
    doc="recompute-outputs.md",
)
FEATURES = (FEATURE,)
