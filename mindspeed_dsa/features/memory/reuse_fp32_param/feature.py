"""Declaration of reuse-fp32-param: bfloat16 weights and float32 master weights in one storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory.conditions import (
    Row,
    check_arguments,
    check_optimizer,
)
from mindspeed_dsa.megatron import optimizer, releases
from mindspeed_dsa.megatron.configuration import argument, check_cached_saves, check_weight_shards
from mindspeed_dsa.megatron.graphs import OPTIMIZER, refuse_graphs
from mindspeed_dsa.megatron.low_precision import check_stored
from mindspeed_dsa.megatron.optimizer import DISTRIBUTED, FLOAT16, MIXED, Hook

_FLAG = "--reuse-fp32-param"
_REFUSED: tuple[Row, ...] = (
    ("fp16", "it needs bfloat16, which is the upper half of a float32; float16 is not", "use --bf16"),
    (
        "use_precision_aware_optimizer",
        "it keeps the master weights itself (with store_param_remainders as remainders, too)",
        "choose one of the two",
    ),
    ("optimizer_cpu_offload", "it moves the master weights to the host", "choose one of the two"),
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
        "moe_single_grouped_weight",
        "Transformer Engine keeps reading the memory that such a weight was built in",
        "omit --moe-single-grouped-weight",
    ),
    (
        "moe_single_grouped_bias",
        "Transformer Engine keeps reading the memory that such a bias was built in",
        "omit --moe-single-grouped-bias",
    ),
    (
        "rl_offload_optimizer_during_inference",
        "it moves weights to the host without their lower halves",
        "omit --rl-offload-optimizer-during-inference",
    ),
)
_OPTIMIZERS = ("adam", "sgd")


def check_shared_weights(args: Any, options: Any = None) -> Iterator[str]:
    """Yield arguments or optimizer settings that conflict with ``--reuse-fp32-param``."""
    yield from check_arguments(args, _FLAG, _REFUSED)
    yield from check_stored(args, _FLAG, "only a bf16 weight is the upper half of its master weight")
    yield from check_weight_shards(args, _FLAG)
    yield from check_cached_saves(args, _FLAG, "float32 weights")
    if argument(args, "save_params_interval") and argument(args, "overlap_param_gather"):
        yield (
            f"{_FLAG}: --save-params-interval saves weights before --overlap-param-gather has gathered them, "
            "and storages hold parts of master weights until then; omit one of the two"
        )
    yield from refuse_graphs(
        args, _FLAG, "the step reads on the host which weights have no pair", {OPTIMIZER}
    )
    # A namespace without `bf16` does not come from Megatron.
    if hasattr(args, "bf16") and not args.bf16 and not getattr(args, "fp16", False):
        yield (
            f"{_FLAG}: weights are float32, so there are no two copies to put in one storage; add --bf16 "
            "or omit the flag"
        )
    why = "is not known to leave the master weights alone outside of its step"
    yield from check_optimizer(args, _FLAG, _OPTIMIZERS, why)


FEATURE = Feature(
    name="reuse-fp32-param",
    summary="Keeps bfloat16 weights and float32 master weights in one storage, exactly.",
    flags=(
        Flag(
            "--reuse-fp32-param",
            "Keep bfloat16 weights and float32 master weights in one storage: saves 2 bytes per parameter, "
            "2/DP with the distributed optimizer.",
        ),
    ),
    patches=optimizer.rows(
        "mindspeed_dsa.features.memory.reuse_fp32_param.shared_weights:SharedWeights",
        Hook(
            "built",
            "model weights share a storage with the master weights; with the distributed optimizer those of "
            "this rank's shard lie over the bucket during a step",
            (FLOAT16, DISTRIBUTED),
        ),
        Hook("step", "float32 weights are there for the step, which a skipped step never reaches", (MIXED,)),
        Hook(
            "before_grads",
            "after a step that failed in the middle, no part of a chain of optimizers makes its step",
            (MIXED,),
        ),
        Hook("master_to_model", "the bfloat16 weights are made in the storage of the master weights"),
        Hook("model_to_master", "master weights are set from the model's, or from a state dict"),
        Hook("state_dict", "checkpoints hold ordinary float32 weights", (FLOAT16,)),
        Hook("load_state_dict", "ordinary float32 weights are read from a checkpoint", (FLOAT16,)),
        Hook("get_parameter", "checkpoints hold ordinary float32 weights"),
        Hook("set_parameter", "ordinary float32 weights are read from a checkpoint"),
        Hook("load_parameters", "old checkpoints are copied into the master weights"),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    check=check_shared_weights,
    doc="reuse-fp32-param.md",
)
