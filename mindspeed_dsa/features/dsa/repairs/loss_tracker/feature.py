"""Logging of the indexer loss: correct device, all layers, no deadlock."""

from __future__ import annotations

from mindspeed_dsa.megatron.dsa import DSA, dsa_repair
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.loss_tracker"

_HELPER = f"{DSA}:DSAIndexerLossLoggingHelper"
_IMPL = f"{_HERE}.tracker"
_VERSIONS = ">=0.16,<0.21"

FEATURE = dsa_repair(
    "dsa-loss-tracker",
    summary="Logs the indexer loss on any device, with MTP layers, and with stages that have no DSA layer.",
    switch_help="Track the indexer loss for logging with this library's tracker.",
    patches=(
        Patch(
            f"{_HELPER}.save_loss_to_tracker",
            "replace",
            f"{_IMPL}:save_loss",
            "allocates on the CUDA device, and MTP layers write past its end",
            params=("loss", "layer_number", "num_layers", "reduce_group", "avg_group"),
            versions=_VERSIONS,
            factory=True,
        ),
        Patch(
            f"{_HELPER}.clean_loss_in_tracker",
            "replace",
            f"{_IMPL}:clean_loss",
            "also resets which layers have reported",
            versions=_VERSIONS,
            factory=True,
        ),
        Patch(
            f"{_HELPER}.reduce_loss_in_tracker",
            "replace",
            f"{_IMPL}:reduce_loss",
            "a pipeline rank that has nothing to report leaves the others hanging",
            versions=_VERSIONS,
            factory=True,
        ),
        Patch(
            f"{_HELPER}.track_indexer_metrics",
            "replace",
            f"{_IMPL}:track_metrics",
            "averages over all layers, those without an indexer included",
            params=(
                "loss_scale",
                "iteration",
                "writer",
                "wandb_writer",
                "total_loss_dict",
                "per_layer_logging",
            ),
            versions=_VERSIONS,
            factory=True,
        ),
    ),
)
