"""Tensor parallel communication in chunks, behind the matmul of the layer that waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_dsa.features.base import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.memory.recompute_limits import own_settings
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.say import say

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


def sequence_parallel_problems(args: Any, flag: str) -> Iterator[str]:
    """What operators need that gather and scatter rows."""
    if getattr(args, "tensor_model_parallel_size", 1) > 1 and not getattr(args, "sequence_parallel", True):
        yield (
            f"{flag}: its operators gather and scatter rows, which tensor parallel ranks only do under "
            f"sequence parallelism; add --sequence-parallel or leave {flag} out"
        )


def tell_of_transformer_engine(args: Any, flag: str) -> None:
    """Its layers are nobody's mistake, but whoever expects them to change should know."""
    if getattr(args, "transformer_impl", None) == "transformer_engine":
        say(
            f"{flag} leaves Transformer Engine's layers alone, which have --tp-comm-overlap; Megatron's own "
            "linear layers, such as the output layer, overlap"
        )


def wanted(settings: Any) -> bool:
    """On, or an option is set that has no effect: a mistake that `validate` tells."""
    return _switched_on(settings) or any(True for _ in _without_effect(settings))


def _switched_on(settings: Any) -> bool:
    """Not back off by a chunk count of 1."""
    count = getattr(settings, "coc_parallel_num", None)
    switches = ("use_ascend_coc", "coc_fused_kernel")
    return count != 1 and (count is not None or any(getattr(settings, name, False) for name in switches))


def _without_effect(settings: Any) -> Iterator[str]:
    count = getattr(settings, "coc_parallel_num", None)
    if count and getattr(settings, "coc_fused_kernel", False):
        yield (
            f"--coc-parallel-num {count} has no effect with --coc-fused-kernel, whose operators know their "
            "own chunks; drop one of them"
        )
    again = getattr(settings, "coc_recompute_all_gather", None)
    on = _switched_on(settings) or getattr(settings, "use_ascend_mc2", False)
    if again is not None and not on:
        flag = "--coc-recompute-all-gather" if again else "--no-coc-recompute-all-gather"
        yield (
            f"{flag} has no effect without --use-ascend-coc, or with --coc-parallel-num 1, which switches "
            "the overlap off; switch it on or drop this"
        )


def tensor_parallel_problems(args: Any, flag: str) -> Iterator[str]:
    """What any overlap of tensor parallel communication needs."""
    if getattr(args, "tensor_model_parallel_size", None) == 1:
        yield (
            f"{flag}: with --tensor-model-parallel-size 1 there is no communication to hide; leave {flag} "
            "out or use at least 2"
        )


def coc_problems(args: Any) -> Sequence[str]:
    """What in Megatron's arguments does not go together with chunks."""
    settings = own_settings() or args
    found = [*_without_effect(settings)]
    if found:
        return found
    found += tensor_parallel_problems(args, "--use-ascend-coc")
    tell_of_transformer_engine(args, "--use-ascend-coc")
    if getattr(settings, "coc_fused_kernel", False):
        found += sequence_parallel_problems(args, "--coc-fused-kernel")
    elif getattr(args, "deterministic_mode", False) and not getattr(settings, "coc_parallel_num", None):
        found.append(
            "--use-ascend-coc: a measured number of chunks may differ from run to run, and the last bits "
            "with it, which --deterministic-mode rules out; fix it, for example with --coc-parallel-num 4"
        )
    return found


def mc2_problems(args: Any) -> Sequence[str]:
    """What in Megatron's arguments does not go together with MC2."""
    tell_of_transformer_engine(args, "--use-ascend-mc2")
    return [
        *tensor_parallel_problems(args, "--use-ascend-mc2"),
        *sequence_parallel_problems(args, "--use-ascend-mc2"),
    ]


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
        Flag(
            "--coc-fused-kernel",
            "On CUDA, with sequence parallelism: PyTorch's fused operators on symmetric memory in place of "
            "chunks.",
        ),
    ),
    patches=PATCHES,
    requires=Requires(versions={"megatron-core": ">=0.12.1,<0.20"}),
    active=wanted,
    validate=coc_problems,
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
    requires=Requires(versions={"megatron-core": ">=0.12.1,<0.20"}, platforms=("npu",)),
    conflicts=(
        Conflict(
            COC.name,
            "both overlap the same transfers, one in chunks, the other inside an operator; leave one of "
            "--use-ascend-coc and --use-ascend-mc2 out",
        ),
    ),
    validate=mc2_problems,
    doc="ascend-mc2.md",
)
FEATURES = (COC, MC2)
