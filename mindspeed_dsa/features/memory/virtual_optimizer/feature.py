"""Adam's moments in host memory that the device addresses directly."""

from __future__ import annotations

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.memory.switches import is_given
from mindspeed_dsa.features.memory.virtual_optimizer.options import Options
from mindspeed_dsa.features.memory.virtual_optimizer.validation import check_mapped_moments
from mindspeed_dsa.megatron import configuration, optimizer, releases
from mindspeed_dsa.megatron.optimizer import Hook

_COPIES = "on NPUs moments cannot be copied as they are"

FEATURE = Feature(
    name="virtual-optimizer",
    summary="Keeps Adam's moments in host memory that the device addresses directly, within a quota.",
    flags=(
        Flag(
            "--virtual-optimizer",
            "Keep moments in host memory that the device addresses: 'all', or GiB for each process, or GiB "
            "for the processes of each pipeline stage. Up to 8 bytes per parameter less on the device.",
            kind="value",
            nargs="+",
            metavar="GIB",
        ),
    ),
    patches=optimizer.rows(
        "mindspeed_dsa.features.memory.virtual_optimizer.mapped_moments:MappedMoments",
        Hook("built", "the moments get their places before the first step"),
        Hook("step", "an optimizer makes moments of its own for parameters that have none"),
        Hook("state_dict", _COPIES),
        Hook("load_state_dict", "moments are copied to their places, not to the device first"),
        Hook("get_parameter", _COPIES),
        Hook("set_parameter", _COPIES),
        Hook("load_parameters", _COPIES),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    conflicts=(
        Conflict(
            "swap-optimizer",
            "both move the moments to the host; use --swap-optimizer for the least device memory, or "
            "--virtual-optimizer to keep the optimizer's own step",
        ),
    ),
    active=is_given("virtual_optimizer"),
    options=Options.of,
    validate=configuration.validate(check_mapped_moments, Options.of),
    doc="virtual-optimizer.md",
)
FEATURES = (FEATURE,)
