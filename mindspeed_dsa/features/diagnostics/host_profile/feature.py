"""What the host does in one training step, by class of module."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.features.diagnostics.host_profile.options import Options
from mindspeed_dsa.features.diagnostics.host_profile.validation import check_profile, profile_wanted
from mindspeed_dsa.patches.spec import Patch

FEATURE = Feature(
    name="host-profile",
    summary="Records host time, operators and synchronisations of one training step by class of module.",
    flags=(
        Flag(
            "--host-profile",
            "Write what the host does in one training step to FILE, from rank 0; "
            "`python -m mindspeed_dsa host-profile -- COMMAND` sets it and prints the file.",
            kind="value",
            metavar="FILE",
        ),
        Flag(
            "--host-profile-step",
            "The step that is recorded, counted from 1 in this run, and timed by function in the next one; "
            "default: 4.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "wrap",
            "mindspeed_dsa.features.diagnostics.host_profile.recorder:record_steps",
            "a step of the schedule begins and ends here",
        ),
    ),
    active=profile_wanted,
    options=Options.of,
    validate=check_profile,
    doc="host-profile.md",
)
FEATURES = (FEATURE,)
