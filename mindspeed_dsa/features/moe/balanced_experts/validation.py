"""What does not combine with balanced experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.moe.balanced_experts.options import Options
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.measured import check_measured

_FLAG = "--balanced-moe-experts"
_REFUSED = {
    "moe_pad_expert_input_to_capacity": (
        "pads every expert to the same number of rows, so that there is nothing to balance"
    ),
    "moe_latent_size": "has projections between the router and the experts, which moved tokens would miss",
    "moe_apply_probs_on_input": "scales rows before the experts, which moved tokens would miss",
    "overlap_moe_expert_parallel_comm": "takes the layer apart into pieces with a backward of their own",
    "delay_wgrad_compute": "computes weight gradients when those of moved experts have returned already",
    "overlap_dispatch_backward_with_experts_wgrad": (
        "computes weight gradients beside the transfer behind which those of moved experts return"
    ),
    "enable_cuda_graph": "records a step whose plan would never change again",
    "external_cuda_graph": "records a step whose plan would never change again",
    "use_megatron_fsdp": "shards the weights that would travel",
    "use_custom_fsdp": "shards the weights that would travel",
    "use_torch_fsdp2": "shards the weights that would travel",
}
"""Arguments of Megatron that are refused when they are set, and why."""


def check_arguments(args: Any, options: Options) -> Iterator[str]:
    """What in a job's arguments does not combine with the feature."""
    yield from check_balanced(args, options)
    # In a configuration this may be a default that says nothing of the layers, which are looked at instead.
    if options.switched_on and argument(args, "transformer_impl") not in (None, "local"):
        yield f"{_FLAG} moves the weights of Megatron's own layers; add --transformer-impl local"


def check_balanced(args: Any, options: Options) -> Iterator[str]:
    """What in arguments, or in a model's configuration, does not combine with the feature."""
    if not options.switched_on:
        yield (
            "--balanced-moe-hot-expert-num, --balanced-moe-matmul-rate and --balanced-moe-link-rate have no "
            f"effect without {_FLAG}; add that or omit them"
        )
        return
    yield from _check_options(args, options)
    yield from _check_parallelism(args)
    for name, why in _REFUSED.items():
        if argument(args, name):
            flag = "--" + name.replace("_", "-")
            yield f"{_FLAG} cannot be used with {flag}, which {why}; omit one of them"
    for name in ("fp8", "fp4"):
        if argument(args, name):
            yield f"{_FLAG} moves weights in the model's dtype, not in {name}; omit --{name}-format or this"
    if (argument(args, "cuda_graph_impl") or "none") != "none":
        yield f"{_FLAG} cannot be used with --cuda-graph-impl: a graph would keep one plan; omit one of them"


def _check_options(args: Any, options: Options) -> Iterator[str]:
    experts = argument(args, "num_experts") or argument(args, "num_moe_experts")
    if not experts:
        yield f"{_FLAG}: the model has no experts; add --num-experts or omit {_FLAG}"
    elif not 1 <= options.limit <= experts:
        yield (
            f"--balanced-moe-hot-expert-num {options.limit}: give at least 1, and at most the {experts} "
            "experts of a layer"
        )
    rates = {"matmul": options.matmul_rate, "link": options.link_rate}
    for name, rate in rates.items():
        if rate is not None and not rate > 0:
            yield f"--balanced-moe-{name}-rate {rate}: give a positive rate, or omit it to have it measured"
    if None in rates.values():
        missing = [f"--balanced-moe-{name}-rate" for name, rate in rates.items() if rate is None]
        yield from check_measured(
            args, _FLAG, "the rates that decide which experts move", f"give {' and '.join(missing)}"
        )


def _check_parallelism(args: Any) -> Iterator[str]:
    if argument(args, "expert_model_parallel_size") == 1:
        yield (
            f"{_FLAG}: with --expert-model-parallel-size 1 all experts are on every rank; use at least 2 or "
            f"omit {_FLAG}"
        )
    size = argument(args, "expert_tensor_parallel_size")
    if size is None:
        size = argument(args, "tensor_model_parallel_size") or 1
    if size > 1:
        yield (
            f"{_FLAG} moves whole experts, and here each is split over {size} ranks; add "
            "--expert-tensor-parallel-size 1"
        )
    dispatcher = argument(args, "moe_token_dispatcher_type")
    if dispatcher not in (None, "alltoall"):
        yield (
            f"{_FLAG} keeps tokens out of the all-to-all, which the {dispatcher} dispatcher does not have; "
            "use --moe-token-dispatcher-type alltoall"
        )
