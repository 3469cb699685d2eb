"""What does not combine with shared storage of bfloat16 and float32 weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.memory.moved_state import Row, check_arguments, check_optimizer
from mindspeed_dsa.features.memory.weight_shards import check_weight_shards

_FLAG = "--reuse-fp32-param"
_REFUSED: tuple[Row, ...] = (
    ("fp16", "it needs bfloat16, which is the upper half of a float32; float16 is not", "use --bf16"),
    (
        "use_precision_aware_optimizer",
        "it keeps the master weights itself (with store_param_remainders as remainders, too)",
        "choose one of the two",
    ),
    ("optimizer_cpu_offload", "it moves the master weights to the host", "choose one of the two"),
    ("fp8", "weights in fp8 are not the upper halves of the master weights", "omit --fp8-format"),
    ("fp4", "weights in fp4 are not the upper halves of the master weights", "omit --fp4-format"),
    ("use_megatron_fsdp", "it shards the weights by itself", "use --use-distributed-optimizer alone"),
    ("use_torch_fsdp2", "it shards the weights by itself", "use --swap-optimizer, which saves more"),
    ("use_custom_fsdp", "it shards the weights by itself", "use --use-distributed-optimizer alone"),
    ("nccl_ub", "weights move to a storage that is not registered with NCCL", "omit --use-nccl-ub"),
    ("qk_clip", "it changes the master weights between steps, when there are none", "omit --qk-clip"),
    (
        "log_params_norm",
        "it reads the master weights between steps, when there are none",
        "omit --log-params-norm",
    ),
    (
        "rl_offload_optimizer_during_inference",
        "it moves weights to the host without their lower halves",
        "omit --rl-offload-optimizer-during-inference",
    ),
)
_OPTIMIZERS = ("adam", "sgd")


def check_shared_weights(args: Any, options: Any = None) -> Iterator[str]:
    """What in arguments, or in an optimizer's configuration, does not combine with the feature."""
    yield from check_arguments(args, _FLAG, _REFUSED)
    yield from check_weight_shards(args, _FLAG)
    # A namespace without bf16 is not Megatron's.
    if hasattr(args, "bf16") and not args.bf16 and not getattr(args, "fp16", False):
        yield (
            f"{_FLAG}: weights are float32, so there are no two copies to put in one storage; add --bf16 "
            "or omit the flag"
        )
    why = "is not known to leave the master weights alone outside of its step"
    yield from check_optimizer(args, _FLAG, _OPTIMIZERS, why)
