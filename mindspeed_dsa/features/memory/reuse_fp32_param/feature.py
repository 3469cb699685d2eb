"""bfloat16 weights and float32 master weights in one storage."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory.reuse_fp32_param.validation import check_shared_weights
from mindspeed_dsa.megatron import configuration, optimizer, releases
from mindspeed_dsa.megatron.optimizer import DISTRIBUTED, FLOAT16, MIXED, Hook

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
    validate=configuration.validate(check_shared_weights),
    doc="reuse-fp32-param.md",
)
FEATURES = (FEATURE,)
