"""Declarations of chunked tensor parallel communication that overlaps with the same layer's matmul.

tests: tests/features/tensor_parallel
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mindspeed_dsa import log
from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.megatron.expert_parallel import LINEAR
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.measured import check_measured
from mindspeed_dsa.patches.spec import Patch

_BACKENDS = {
    "chunked": "mindspeed_dsa.features.tensor_parallel.overlap.chunked",
    "mc2": "mindspeed_dsa.features.tensor_parallel.overlap.mc2",
    "symmetric": "mindspeed_dsa.features.tensor_parallel.overlap.symmetric",
}


@dataclass(frozen=True)
class Options:
    """Options of the overlap.

    Attributes:
        chunks: number of chunks; 0 measures the best number at run time.
        keep_gathered: whether column parallel layers save the gathered input for backward.
        backend: implementation of matmul and collective, a key of :data:`_BACKENDS`.
    """

    chunks: int
    keep_gathered: bool
    backend: str

    @property
    def module(self) -> Any:
        """Return the backend's module."""
        return import_module(_BACKENDS[self.backend])

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build the options from resolved settings or from parsed arguments."""
        again = getattr(settings, "coc_recompute_all_gather", None)
        return cls(
            chunks=getattr(settings, "coc_parallel_num", None) or 0,
            keep_gathered=again is not None and not again,
            backend=_backend(settings),
        )

    @property
    def fused(self) -> bool:
        """Return whether matmul and collective are one fused operator, which chooses its own chunks."""
        return self.backend != "chunked"


def _backend(settings: Any) -> str:
    if getattr(settings, "use_ascend_mc2", False):
        return "mc2"
    return "symmetric" if getattr(settings, "coc_fused_kernel", False) else "chunked"


def check_sequence_parallel(args: Any, flag: str) -> Iterator[str]:
    """Yield an error if sequence parallelism is off, which gather and reduce-scatter operators need."""
    if getattr(args, "tensor_model_parallel_size", 1) > 1 and not getattr(args, "sequence_parallel", True):
        yield (
            f"{flag}: its operators gather and scatter rows, which tensor parallel ranks do only under "
            f"sequence parallelism; add --sequence-parallel or omit {flag}"
        )


def report_transformer_engine(args: Any, flag: str) -> None:
    """Log that the overlap does not affect Transformer Engine's layers."""
    if getattr(args, "transformer_impl", None) == "transformer_engine":
        log.get(flag.removeprefix("--use-")).info(
            "%s does not change Transformer Engine's layers, which have --tp-comm-overlap; Megatron's own "
            "linear layers, such as the output layer, are overlapped",
            flag,
        )


def coc_wanted(settings: Any) -> bool:
    """Return whether the overlap is on, or an option has no effect, which ``check_coc`` must report."""
    return _switched_on(settings) or any(True for _ in _without_effect(settings))


def _switched_on(settings: Any) -> bool:
    """Return whether the overlap is on and not disabled by a chunk count of 1."""
    count = getattr(settings, "coc_parallel_num", None)
    switches = ("use_ascend_coc", "coc_fused_kernel")
    return count != 1 and (count is not None or any(getattr(settings, name, False) for name in switches))


def _without_effect(settings: Any) -> Iterator[str]:
    count = getattr(settings, "coc_parallel_num", None)
    if count and getattr(settings, "coc_fused_kernel", False):
        yield (
            f"--coc-parallel-num {count} has no effect with --coc-fused-kernel, whose operators choose their "
            "own chunks; omit one of them"
        )
    again = getattr(settings, "coc_recompute_all_gather", None)
    on = _switched_on(settings) or getattr(settings, "use_ascend_mc2", False)
    if again is not None and not on:
        flag = "--coc-recompute-all-gather" if again else "--no-coc-recompute-all-gather"
        yield (
            f"{flag} has no effect without --use-ascend-coc, or with --coc-parallel-num 1, which switches "
            f"the overlap off; switch it on or omit {flag}"
        )


def check_tensor_parallel(args: Any, flag: str) -> Iterator[str]:
    """Yield an error if there is no tensor parallelism to overlap."""
    if getattr(args, "tensor_model_parallel_size", None) == 1:
        yield (
            f"{flag}: with --tensor-model-parallel-size 1 there is no communication to hide; omit "
            f"{flag} or use at least 2"
        )
    if getattr(args, "use_megatron_fsdp", False):
        yield (
            f"{flag} adds gradients of chunks to buffers of the whole job, which --use-megatron-fsdp has not "
            "got; omit one of them"
        )


def check_coc(args: Any, options: Any) -> Sequence[str]:
    """Return conflicts of Megatron arguments with chunked communication."""
    problems = [*_without_effect(args)]
    if problems:
        return problems
    problems += check_tensor_parallel(args, "--use-ascend-coc")
    problems += refuse_graphs(args, "--use-ascend-coc", "the host measures and issues each chunk's transfer")
    report_transformer_engine(args, "--use-ascend-coc")
    if getattr(args, "coc_fused_kernel", False):
        problems += check_sequence_parallel(args, "--coc-fused-kernel")
    elif not getattr(args, "coc_parallel_num", None):
        problems += check_tuned(args)
    return problems


def check_tuned(args: Any, options: Any = None) -> Iterator[str]:
    """Yield an error if arguments or a layer's configuration rule out measuring the number of chunks."""
    return check_measured(
        args, "--use-ascend-coc", "the best number of chunks", "fix it, for example with --coc-parallel-num 4"
    )


def check_mc2(args: Any, options: Any) -> Sequence[str]:
    """Return conflicts of Megatron arguments with MC2."""
    report_transformer_engine(args, "--use-ascend-mc2")
    return [
        *check_tensor_parallel(args, "--use-ascend-mc2"),
        *check_sequence_parallel(args, "--use-ascend-mc2"),
    ]


_LAYERS = "megatron.core.tensor_parallel.layers"
_IMPL = "mindspeed_dsa.features.tensor_parallel.overlap.layers"
COUNTS = (0, 1, 2, 4, 8)

PATCHES = (
    Patch(
        f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce",
        "wrap",
        f"{_IMPL}:overlap_column_parallel",
        "overlaps communication with the matmuls of column parallel layers, forward and backward",
        params=LINEAR,
    ),
    Patch(
        f"{_LAYERS}:linear_with_frozen_weight",
        "wrap",
        f"{_IMPL}:overlap_column_parallel",
        "overlaps communication with the matmuls of column parallel layers whose weight is frozen",
        params=LINEAR,
    ),
    Patch(
        f"{_LAYERS}:RowParallelLinear.forward",
        "wrap",
        f"{_IMPL}:overlap_row_parallel",
        "overlaps the reduction of a row parallel layer with its matmul",
        params=("input_",),
    ),
)
"""Patches shared with the fused kernels, which differ only in the backend."""


COC = Feature(
    name="ascend-coc",
    summary="Splits the matmul of tensor parallel layers and its collective into chunks that overlap.",
    overlaps="tensor parallel transfers",
    flags=(
        Flag(
            "--use-ascend-coc",
            "Hide the communication of tensor parallel linear layers behind their matmuls, on any device; "
            "--tp-comm-overlap-chunks 0 is the same under a neutral name.",
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
    check=check_coc,
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
    check=check_mc2,
    doc="ascend-mc2.md",
)
