"""The indexer's Hadamard rotation without ``fast_hadamard_transform``, for any float type."""

from __future__ import annotations

from mindspeed_dsa.features.dsa.repairs.hadamard.validation import check_head_dim
from mindspeed_dsa.megatron.dsa import DSA, FIXES, dsa_repair, megatron_flag
from mindspeed_dsa.patches.spec import Patch

FEATURE = dsa_repair(
    "dsa-hadamard",
    summary="Rotates indexer queries and keys on any device and in any float type.",
    switch_help="Rotate in plain PyTorch where fast_hadamard_transform is missing or does not apply.",
    validate=check_head_dim,
    megatron_flags=(megatron_flag("--dsa-indexer-head-dim", int),),
    patches=(
        Patch(
            f"{DSA}:rotate_activation",
            "wrap",
            f"{FIXES}.hadamard.rotate:rotate_anywhere",
            "asserts bfloat16 and a CUDA-only package",
            params=("x",),
            versions=">=0.16,<0.21",
        ),
    ),
)
