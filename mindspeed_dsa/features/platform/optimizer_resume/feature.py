"""Resuming the distributed optimizer where Megatron uses torch's Adam."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, on_platform
from mindspeed_dsa.megatron import across_layouts
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import PLATFORM

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_IMPL = "mindspeed_dsa.features.platform.optimizer_resume.step_counts"


FEATURE = Feature(
    name="cpu-optimizer-resume",
    summary="Lets the distributed optimizer resume without Transformer Engine and Apex.",
    flags=(PLATFORM,),
    patches=(
        Patch(
            f"{_OPTIMIZER}.state_dict",
            "wrap",
            f"{_IMPL}:start_state",
            "an Adam without a step gets the step count 0; Megatron asserts that there is one",
        ),
        Patch(
            f"{_OPTIMIZER}.load_state_dict",
            "wrap",
            f"{_IMPL}:separate_step_counts",
            "each parameter gets its own step count; a shared one is incremented once per parameter",
            params=("state_dict",),
        ),
        Patch(
            f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
            "wrap",
            f"{_IMPL}:keep_step_count",
            "no format of the moments has a valid step count; float32 weights require gradients",
            params=("model_param", "tensors"),
        ),
        *across_layouts.ROWS,
    ),
    active=on_platform("cpu"),
    doc="cpu-platform",
    platform_support=True,
)
