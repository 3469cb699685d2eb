"""The indexer loss has the same weight regardless of the number of microbatches."""

from __future__ import annotations

from mindspeed_dsa.megatron.dsa import DSA, dsa_repair
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.loss_scale"

FEATURE = dsa_repair(
    "dsa-loss-scale",
    summary="Scales the indexer loss like the main loss: microbatches, context parallel size, fp16 scale, "
    "per-token loss.",
    switch_help="Scale the indexer loss's gradient like the main loss's.",
    patches=(
        Patch(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            "wrap",
            f"{_HERE}.scale:set_indexer_loss_scale",
            "the scale is never set: gradients grow with the number of microbatches and lack the fp16 scale",
            params=("config", "num_microbatches", "cp_group_size"),
            versions=">=0.14,<0.19",
        ),
        Patch(
            "megatron.core.pipeline_parallel.schedules:forward_step",
            "wrap",
            f"{_HERE}.scale:set_indexer_loss_scale",
            "the same, for a loss computed in this function",
            params=("config", "num_microbatches"),
            versions=">=0.12.1,<0.14",
        ),
        Patch(
            f"{DSA}:DSAIndexerLossAutoScaler.backward",
            "wrap",
            f"{_HERE}.scale:weigh_by_tokens",
            "with --calculate-per-token-loss gradients are divided by the number of tokens at the end",
            params=("ctx", "grad_output"),
            versions=">=0.16,<0.19",
        ),
    ),
)
