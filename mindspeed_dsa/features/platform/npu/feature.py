"""Declaration of the NPU platform: names that torch_npu does not redirect from CUDA.

torch_npu's ``transfer_to_npu`` redirects calls and devices to the NPU. It does not cover names of tensor
types, arguments that HCCL rejects, and calls of NVIDIA's libraries. Without the patches declared here no
Megatron job completes a training step.
"""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, on_platform
from mindspeed_dsa.features.platform.without_cuda import rows as without_cuda
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import PLATFORM

_HERE = "mindspeed_dsa.features.platform.npu.hccl"

NPU = Feature(
    name="npu-platform",
    summary="Redirects what torch_npu leaves to CUDA: Megatron trains on an NPU with HCCL.",
    flags=(PLATFORM,),
    patches=(
        *without_cuda.ROWS,
        Patch(
            "torch.distributed.distributed_c10d:all_reduce",
            "wrap",
            f"{_HERE}:reduce_doubles",
            "HCCL reduces no fp64: tensors of it are gathered and reduced on the host",
            params=("tensor", "op", "group", "async_op"),
            stale="report",
        ),
        Patch(
            "megatron.training.dist_signal_handler:get_device",
            "wrap",
            f"{_HERE}:device_of_hccl",
            "the handler of --exit-signal-handler knows the devices of nccl and gloo alone",
            params=("local_rank",),
            required=False,
        ),
    ),
    active=on_platform("npu"),
    doc="npu-platform.md",
    platform_support=True,
)
