"""Checks of combinations with overlapped tensor parallel communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_dsa import log
from mindspeed_dsa.megatron.measured import check_measured


def check_sequence_parallel(args: Any, flag: str) -> Iterator[str]:
    """Report missing requirements of operators that gather and scatter rows."""
    if getattr(args, "tensor_model_parallel_size", 1) > 1 and not getattr(args, "sequence_parallel", True):
        yield (
            f"{flag}: its operators gather and scatter rows, which tensor parallel ranks do only under "
            f"sequence parallelism; add --sequence-parallel or omit {flag}"
        )


def report_transformer_engine(args: Any, flag: str) -> None:
    """Log that Transformer Engine's layers do not change; that is not an error."""
    if getattr(args, "transformer_impl", None) == "transformer_engine":
        log.get(flag.removeprefix("--use-")).info(
            "%s does not change Transformer Engine's layers, which have --tp-comm-overlap; Megatron's own "
            "linear layers, such as the output layer, are overlapped",
            flag,
        )


def coc_wanted(settings: Any) -> bool:
    """Whether it is on, or an option without effect is set, which `validate` reports."""
    return _switched_on(settings) or any(True for _ in _without_effect(settings))


def _switched_on(settings: Any) -> bool:
    """Whether it is on, and not disabled by a chunk count of 1."""
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
    """Report missing requirements of any overlap of tensor parallel communication."""
    if getattr(args, "tensor_model_parallel_size", None) == 1:
        yield (
            f"{flag}: with --tensor-model-parallel-size 1 there is no communication to hide; omit "
            f"{flag} or use at least 2"
        )


def check_coc(args: Any) -> Sequence[str]:
    """Report Megatron arguments that are incompatible with chunks."""
    found = [*_without_effect(args)]
    if found:
        return found
    found += check_tensor_parallel(args, "--use-ascend-coc")
    report_transformer_engine(args, "--use-ascend-coc")
    if getattr(args, "coc_fused_kernel", False):
        found += check_sequence_parallel(args, "--coc-fused-kernel")
    elif not getattr(args, "coc_parallel_num", None):
        found += check_tuned(args)
    return found


def check_tuned(args: Any, options: Any = None) -> Iterator[str]:
    """Whether the number of chunks may be tuned, in arguments or in a layer's configuration."""
    return check_measured(
        args, "--use-ascend-coc", "the best number of chunks", "fix it, for example with --coc-parallel-num 4"
    )


def check_mc2(args: Any) -> Sequence[str]:
    """Report Megatron arguments that are incompatible with MC2."""
    report_transformer_engine(args, "--use-ascend-mc2")
    return [
        *check_tensor_parallel(args, "--use-ascend-mc2"),
        *check_sequence_parallel(args, "--use-ascend-mc2"),
    ]
