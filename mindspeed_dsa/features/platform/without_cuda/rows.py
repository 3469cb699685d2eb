"""Patches for Megatron on devices without CUDA's kernels and names: CPUs and NPUs.

The CPU and the NPU feature both include these patches. Replacement functions query the current platform where
the two differ.
"""

from __future__ import annotations

from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.platform.without_cuda.functions"

ROWS = (
    # Rows for torch have `stale="report"`: torch keeps tables of its own functions (overrides, dynamo, jit),
    # which may still refer to the originals.
    Patch(
        "torch:Tensor.type",
        "wrap",
        f"{_HERE}:type_as_on_cuda",
        "the type's name equals the torch.cuda name that optimizers compare with",
        stale="report",
    ),
    Patch(
        "torch.cuda:device_memory_used",
        "replace",
        f"{_HERE}:device_memory_used",
        "torch asks NVIDIA's driver, which is not there",
        stale="report",
    ),
    Patch(
        "torch.cuda.nvtx:_nvtx",
        "value",
        f"{_HERE}:NO_NVTX",
        "range markers are ignored, which raise in a torch that is not built for CUDA",
        stale="report",
    ),
    Patch(
        "megatron.core.jit:__dict__",
        "entry",
        f"{_HERE}:jit_fuser",
        "jit_fuser returns functions unchanged: compiling them costs more than it saves on a CPU, and fails "
        "on an NPU that has no Triton of its own",
        key="jit_fuser",
        factory=True,
    ),
    Patch(
        "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available",
        "replace",
        f"{_HERE}:no_softmax_kernel",
        "the fused softmax kernels are CUDA extensions; Megatron's own torch path computes the same",
    ),
    Patch(
        "megatron.core.parallel_state:get_nccl_options",
        "replace",
        f"{_HERE}:no_nccl_options",
        "options of NCCL's streams are neither gloo's nor HCCL's",
        params=("pg_name", "nccl_comm_cfgs"),
        required=False,
    ),
    Patch(
        "megatron.training.utils:get_device_arch_version",
        "replace",
        f"{_HERE}:no_device_arch",
        "the device has no CUDA architecture: 0",
        required=False,
    ),
    Patch(
        "megatron.legacy.fused_kernels:load",
        "replace",
        f"{_HERE}:no_kernels_to_load",
        "Megatron's CUDA kernels are compiled with nvcc, which is not there",
        versions="<0.17",
        required=False,
    ),
)
"""Rows shared by ``cpu-platform`` and ``npu-platform``."""
