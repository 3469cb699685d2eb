"""SP-TP-SP: latent attention whose down and output projections work on a rank's own rows."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.attention.sp_tp_sp.validation import check_sp_tp_sp
from mindspeed_dsa.megatron.dsa import MLA
from mindspeed_dsa.patches.spec import Patch

FEATURE = Feature(
    name="mla-sp-tp-sp",
    summary="Latent attention by rows, by heads and by rows again: an all-to-all and a whole output "
    "projection in place of a reduce-scatter.",
    flags=(
        Flag(
            "--mla-sp-tp-sp",
            "With tensor and sequence parallelism: gather latents, attend by head, exchange heads for rows, "
            "and project the own rows with whole weights.",
        ),
    ),
    requires=Requires(features=("dense-context-parallel",)),
    validate=check_sp_tp_sp,
    doc="mla-sp-tp-sp.md",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.__init__",
            "wrap",
            "mindspeed_dsa.features.attention.sp_tp_sp.layers:project_own_rows",
            "down projections and output projection are whole on every rank",
            params=("config", "submodules", "layer_number"),
        ),
    ),
)
