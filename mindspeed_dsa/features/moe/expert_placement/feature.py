"""Experts on ranks so that the ranks have equal loads."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.moe.expert_placement.options import Options
from mindspeed_dsa.features.moe.expert_placement.validation import check_expert_placement
from mindspeed_dsa.megatron import moe_layers
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.moe.expert_placement"
_RANGE = ">=0.13,<0.21"

FEATURE = Feature(
    name="moe-expert-placement",
    summary="Holds each expert on the rank that a recorded load asks for; checkpoints stay as they are.",
    flags=(
        Flag(
            "--moe-expert-placement",
            "Hold experts on ranks as FILE says, or 'auto': as the report of --moe-router-load-report in its "
            "folder, or beside the checkpoints of --load or --save, asks for.",
            kind="value",
            metavar="FILE",
        ),
        Flag("--load", "Megatron's own flag; 'auto' looks for a report there.", kind="value", megatron=True),
        Flag("--save", "Megatron's own flag; 'auto' looks for a report there.", kind="value", megatron=True),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.moe.router:TopKRouter.forward",
            "wrap",
            f"{_HERE}.routing:route_to_slots",
            "tokens are dispatched to slots; all that the router itself computes is about experts",
            params=("input",),
            versions=_RANGE,
            priority=10,
        ),
        Patch(
            "megatron.core.transformer.moe.experts:SequentialMLP.sharded_state_dict",
            "wrap",
            f"{_HERE}.checkpoints:number_experts",
            "checkpoints know experts by their numbers, wherever they are held",
            params=("prefix", "sharded_offsets", "metadata"),
            versions=_RANGE,
        ),
        Patch(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
            "wrap",
            f"{_HERE}.checkpoints:refuse_buckets",
            "some formats of its state know no experts, only places in a rank's buffers",
            params=("is_loading", "sharding_type", "metadata"),
            versions=_RANGE,
        ),
        Patch(
            "megatron.training.checkpointing:_load_base_checkpoint",
            "wrap",
            f"{_HERE}.checkpoints:refuse_files_of_ranks",
            "other than distributed checkpoints know no experts, only places on a rank",
            versions=_RANGE,
            required=False,
        ),
        *moe_layers.rows(
            f"{_HERE}.placing", "experts get their slots, and their initial weights follow them", _RANGE
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    options=Options.of,
    validate=check_expert_placement,
    doc="moe-expert-placement.md",
)
