"""Latent attention's shared rotary key under tensor parallelism without sequence parallelism."""

from __future__ import annotations

from mindspeed_dsa.megatron.dsa import MLA, dsa_repair
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.rotary_key_tp_grads"

FEATURE = dsa_repair(
    "dsa-rotary-key-tp-grads",
    summary="Sums the rotary key's gradient over tensor parallel ranks where Megatron does not.",
    switch_help="Sum the rotary key's gradient over tensor parallel ranks where Megatron does not.",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.__init__",
            "wrap",
            f"{_HERE}.rotary_key:sum_rotary_key_gradients",
            "each rank keeps the gradient of its own heads only, and the copies drift apart",
            versions=">=0.16,<0.19",
        ),
    ),
)
