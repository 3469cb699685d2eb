"""Shared declarations for expert parallel features: patches of the all-to-alls, and checks.

Imports neither torch nor the implementations, because the features' ``feature.py`` import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch

LINEAR = (
    *("input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel"),
)
"""Parameters of Megatron's ``linear_with_*`` functions in every release."""
DEFERRED_GRADIENTS = Patch(
    "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
    "wrap",
    "mindspeed_dsa.parallel.weight_gradients:defer_in_linear",
    "computes the weight's gradient later in backward, where the feature has deferred it",
    params=(*LINEAR, "grad_output_buffer"),
    # Outside of chunked communication, which has no work if the weight gradient is deferred.
    priority=1,
)
ROWS = (
    Patch(
        "megatron.core.tensor_parallel.mappings:all_to_all",
        "wrap",
        "mindspeed_dsa.parallel.all_to_all:split_all_to_all",
        "starts an all-to-all, or waits for one, where the feature has asked for that half",
        params=("group", "input_", "output_split_sizes_", "input_split_sizes"),
    ),
    DEFERRED_GRADIENTS,
)
"""Patches for split all-to-alls and deferred weight gradients; each is applied once for all features."""

CONTINUES = "mindspeed_dsa_continues"
"""Attribute of a router: whether a later half of the same microbatch is still to be routed."""


def number_of_experts(args: Any) -> int:
    """Return the number of experts per layer from arguments or a model's configuration, 0 without experts."""
    return argument(args, "num_experts") or argument(args, "num_moe_experts") or 0


def expert_tensor_ranks(args: Any) -> int:
    """Return the number of ranks that each expert is split over."""
    size = argument(args, "expert_tensor_parallel_size")
    # None means the flag is not set; experts are then split like the dense layers.
    return (argument(args, "tensor_model_parallel_size") or 1) if size is None else size


def check_experts(args: Any, flag: str) -> Iterator[str]:
    """Yield a problem if the model has no experts."""
    if not number_of_experts(args):
        yield f"{flag}: the model has no experts; add --num-experts or omit {flag}"


def check_all_to_all(args: Any, flag: str, to: str = "hide") -> Iterator[str]:
    """Yield a problem if the job's MoE layers have no all-to-all between ranks.

    Args:
        args: job's arguments, or a configuration.
        flag: feature's flag.
        to: verb for the message, saying how the feature uses the all-to-alls.
    """
    if argument(args, "expert_model_parallel_size") == 1:
        yield (
            f"{flag}: with --expert-model-parallel-size 1 no token leaves its rank; use at least 2 or omit "
            f"{flag}"
        )
    dispatcher = argument(args, "moe_token_dispatcher_type")
    if dispatcher not in (None, "alltoall"):
        yield (
            f"{flag}: --moe-token-dispatcher-type {dispatcher} has no all-to-all of its own to {to}; use "
            f"--moe-token-dispatcher-type alltoall or omit {flag}"
        )


def run_shared_expert(args: Any, flag: str) -> list[str]:
    """Switch off Megatron's overlap of the shared expert, for ``Feature.rewrite``.

    Args:
        args: job's arguments.
        flag: flag of the feature that overlaps the shared expert with transfers instead.
    """
    if not argument(args, "moe_shared_expert_overlap"):
        return []
    args.moe_shared_expert_overlap = False
    return [f"the shared expert runs under transfers by {flag}, in place of --moe-shared-expert-overlap"]


def layers_with_experts(args: Any) -> list[int]:
    """Return the numbers of the decoder layers with experts, as far as the arguments define them."""
    count, pattern = argument(args, "num_layers") or 0, argument(args, "moe_layer_freq") or 1
    if isinstance(pattern, str):  # Megatron evaluates it later
        return []
    if isinstance(pattern, int):
        return [layer + 1 for layer in range(count) if layer % pattern == 0]
    return [layer + 1 for layer, has_experts in enumerate(pattern) if has_experts]


_FLAGS = {"cpu_offloading": "cpu_offloading_num_layers", "logit_dtype": "output_logit_dtype"}
"""Arguments whose flag has another name."""


def check_refused(args: Any, flag: str, refused: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each argument that is set but that the feature does not support.

    Args:
        args: job's arguments, or a configuration.
        flag: feature's flag.
        refused: dict from argument name to the reason; a value ``"none"`` counts as not set.
    """
    for name, why in refused.items():
        value = argument(args, name)
        if value and value != "none":
            other = _FLAGS.get(name, name).replace("_", "-")
            # Megatron's dropouts are on by default.
            way_out = f"use --{other} 0, or omit {flag}" if other.endswith("dropout") else "omit one of them"
            yield f"{flag} cannot be used with --{other}, which {why}; {way_out}"
