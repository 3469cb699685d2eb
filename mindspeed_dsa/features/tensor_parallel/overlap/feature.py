"""Tensor parallel communication in chunks, overlapped with the matmul of the same layer."""

from __future__ import annotations

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.tensor_parallel.overlap.options import Options
from mindspeed_dsa.features.tensor_parallel.overlap.validation import check_coc, check_mc2, coc_wanted
from mindspeed_dsa.patches.spec import Patch

_LAYERS = "megatron.core.tensor_parallel.layers"
_IMPL = "mindspeed_dsa.features.tensor_parallel.overlap.layers"
_FUNCTION = (
    "input",
    "weight",
    "bias",
    "gradient_accumulation_fusion",
    "allreduce_dgrad",
    "sequence_parallel",
)
COUNTS = (0, 1, 2, 4, 8)

PATCHES = (
    Patch(
        f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce",
        "wrap",
        f"{_IMPL}:overlap_column_parallel",
        "computation and communication of a column parallel layer, forward and backward",
        params=_FUNCTION,
    ),
    Patch(
        f"{_LAYERS}:linear_with_frozen_weight",
        "wrap",
        f"{_IMPL}:overlap_column_parallel",
        "the same with a frozen weight",
        params=_FUNCTION,
    ),
    Patch(
        f"{_LAYERS}:RowParallelLinear.forward",
        "wrap",
        f"{_IMPL}:overlap_row_parallel",
        "computation of a row parallel layer, and the reduction after it",
        params=("input_",),
    ),
)
"""Shared with the fused kernels, which differ in the backend but patch the same functions."""


COC = Feature(
    name="ascend-coc",
    summary="Splits the matmul of tensor parallel layers and its collective into chunks that overlap.",
    flags=(
        Flag(
            "--use-ascend-coc",
            "Hide the communication of tensor parallel linear layers behind their matmuls.",
        ),
        Flag(
            "--coc-parallel-num",
            "Number of chunks; 0, the default, tunes it for each size; 1 switches the overlap "
            "off. Giving a number implies --use-ascend-coc.",
            kind="value",
            type=int,
            choices=COUNTS,
            aliases=("--tp-comm-overlap-chunks",),
        ),
        Flag(
            "--coc-recompute-all-gather",
            "Gather the input of column parallel layers again in backward, as Megatron does; --no-... saves "
            "it, which saves time and costs memory. Default: gather again.",
            kind="auto",
        ),
        Flag(
            "--coc-fused-kernel",
            "On CUDA, with sequence parallelism: PyTorch's fused operators on symmetric memory in place of "
            "chunks.",
        ),
    ),
    patches=PATCHES,
    requires=Requires(versions={"megatron-core": ">=0.12.1,<0.21"}),
    active=coc_wanted,
    options=Options.of,
    validate=check_coc,
    doc="ascend-coc.md",
)
MC2 = Feature(
    name="ascend-mc2",
    summary="Runs matmul and collective of tensor parallel layers as one operator of torch_npu.",
    flags=(
        Flag(
            "--use-ascend-mc2",
            "On NPUs, with sequence parallelism: matmul and collective of tensor parallel linear layers in "
            "one operator.",
        ),
    ),
    patches=PATCHES,
    requires=Requires(versions={"megatron-core": ">=0.12.1,<0.21"}, platforms=("npu",)),
    conflicts=(
        Conflict(
            COC.name,
            "both overlap the same transfers, one in chunks, the other inside an operator; omit one of "
            "--use-ascend-coc and --use-ascend-mc2",
        ),
    ),
    options=Options.of,
    validate=check_mc2,
    doc="ascend-mc2.md",
)
FEATURES = (COC, MC2)
