"""What does not combine with overlapped halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.moe.batch_overlap.options import Options
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.measured import check_measured

_FLAG = "--moe-batch-overlap"
_ALWAYS = "--moe-batch-overlap-always"
_REFUSED = {
    "moe_pad_expert_input_to_capacity": (
        "gives each expert a fixed number of rows of the whole microbatch; without it, capacity works"
    ),
    "moe_shared_expert_overlap": "puts the shared expert under the transfers of the whole microbatch",
    "overlap_moe_expert_parallel_comm": "hides the same transfers behind another microbatch",
    "delay_wgrad_compute": "computes the weight gradients that lie under the transfers at another place",
    "overlap_dispatch_backward_with_experts_wgrad": "puts the same weight gradients under one transfer",
    "fp8": "scales the rows of an expert together, which halves would change",
    "fp4": "scales the rows of an expert together, which halves would change",
    "enable_cuda_graph": "would hold each transfer at a fixed place",
    "external_cuda_graph": "would hold each transfer at a fixed place",
}
"""Arguments of Megatron that are refused when they are set, and why."""
_NAMES = {"fp8": "fp8-format", "fp4": "fp4-format"}
"""Flags that have another name than what they set."""


def check_halves(args: Any, options: Options) -> Iterator[str]:
    """What in arguments, or in a model's configuration, rules out halves or leaves nothing to hide."""
    if not options.switched_on:
        yield f"{_ALWAYS} has no effect without {_FLAG}; add that or omit it"
        return
    if argument(args, "num_moe_experts") is None and not argument(args, "num_experts"):
        yield f"{_FLAG}: the model has no experts; add --num-experts or omit {_FLAG}"
        return
    yield from _check_parallelism(args)
    for name, why in _REFUSED.items():
        if argument(args, name):
            flag = "--" + _NAMES.get(name, name).replace("_", "-")
            yield f"{_FLAG} cannot be used with {flag}, which {why}; omit one of them"
    if (argument(args, "cuda_graph_impl") or "none") != "none":
        yield (
            f"{_FLAG} cannot be used with --cuda-graph-impl, which would hold each transfer at a fixed "
            "place; omit one of them"
        )
    if not options.always:
        yield from _check_measurement(args)


def check_arguments(args: Any, options: Options) -> Iterator[str]:
    """Report what in a job's arguments does not combine with the feature."""
    yield from check_halves(args, options)
    yield from check_choice(args, options)


def check_choice(args: Any, options: Options) -> Iterator[str]:
    """Whether it may be measured if halves pay."""
    if options.switched_on and not options.always:
        yield from check_measured(args, _FLAG, "whether halves pay", f"add {_ALWAYS}")


def _check_measurement(args: Any) -> Iterator[str]:
    if argument(args, "moe_enable_routing_replay"):
        yield (
            f"{_FLAG} measures with forwards that --moe-enable-routing-replay would count as the step's; add "
            f"{_ALWAYS}"
        )


def _check_parallelism(args: Any) -> Iterator[str]:
    if argument(args, "expert_model_parallel_size") == 1:
        yield (
            f"{_FLAG}: with --expert-model-parallel-size 1 no token leaves its rank; use at least 2 or omit "
            f"{_FLAG}"
        )
    size = argument(args, "expert_tensor_parallel_size")
    if size is None:
        size = argument(args, "tensor_model_parallel_size") or 1
    if size > 1:
        yield (
            f"{_FLAG} does not hide the gather and reduce-scatter of experts that are split over {size} "
            "ranks; add --expert-tensor-parallel-size 1"
        )
    dispatcher = argument(args, "moe_token_dispatcher_type")
    if dispatcher not in (None, "alltoall"):
        yield (
            f"{_FLAG}: --moe-token-dispatcher-type {dispatcher} has no all-to-all of its own to hide; use "
            f"--moe-token-dispatcher-type alltoall or omit {_FLAG}"
        )
