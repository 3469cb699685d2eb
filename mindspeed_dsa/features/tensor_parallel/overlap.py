"""Tensor parallel communication in chunks, behind the matmul of the layer that waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_dsa.features.base import Feature, Flag, Requires
from mindspeed_dsa.patches.spec import Patch

_LAYERS = "megatron.core.tensor_parallel.layers"
_IMPL = "mindspeed_dsa.features.tensor_parallel.linear"
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
        f"{_IMPL}:overlap_in_column",
        "what a column parallel layer computes and communicates, forward and backward",
        params=_FUNCTION,
    ),
    Patch(
        f"{_LAYERS}:linear_with_frozen_weight",
        "wrap",
        f"{_IMPL}:overlap_in_column",
        "the same where the weight does not learn",
        params=_FUNCTION,
    ),
    Patch(
        f"{_LAYERS}:RowParallelLinear.forward",
        "wrap",
        f"{_IMPL}:overlap_in_row",
        "what a row parallel layer computes, and the reduction after it",
        params=("input_",),
    ),
)
"""Also those of fused kernels: they differ in who multiplies and communicates, not in where it is done."""


def wanted(settings: Any) -> bool:
    """Switched on, and not back off by a chunk count of 1."""
    count = getattr(settings, "coc_parallel_num", None)
    return count != 1 and (bool(getattr(settings, "use_ascend_coc", False)) or count is not None)


def tensor_parallel_problems(args: Any, flag: str) -> Iterator[str]:
    """What any overlap of tensor parallel communication needs."""
    if getattr(args, "tensor_model_parallel_size", None) == 1:
        yield (
            f"{flag}: with --tensor-model-parallel-size 1 there is no communication to hide; leave {flag} "
            "out or use at least 2"
        )


def problems(args: Any) -> Sequence[str]:
    """What in Megatron's arguments does not go together with the feature."""
    return [*tensor_parallel_problems(args, "--use-ascend-coc")]


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
            "Number of chunks; 0, the default, measures the fastest for each size; 1 switches the overlap "
            "off. Giving a number implies --use-ascend-coc.",
            kind="value",
            type=int,
            choices=COUNTS,
            aliases=("--tp-comm-overlap-chunks",),
        ),
        Flag(
            "--coc-recompute-all-gather",
            "Gather the input of column parallel layers again in backward, as Megatron does; --no-... keeps "
            "it, which saves time and costs memory. Default: gather again.",
            kind="auto",
        ),
    ),
    patches=PATCHES,
    requires=Requires(versions={"megatron-core": ">=0.12.1,<0.20"}),
    active=wanted,
    validate=problems,
    doc="ascend-coc.md",
)
FEATURES = (COC,)
