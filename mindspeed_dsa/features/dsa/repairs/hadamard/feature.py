"""The indexer's Hadamard rotation without ``fast_hadamard_transform``, for any float type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa.megatron.dsa import DSA, dsa_repair, megatron_flag
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.hadamard"


def check_head_dim(args: Any, options: Any) -> Sequence[str]:
    """Report a head size that is not a power of two."""
    size = getattr(args, "dsa_indexer_head_dim", None)
    if size is None or (size > 0 and size & (size - 1) == 0):
        return ()
    return (f"--dsa-indexer-head-dim {size}: the Hadamard rotation needs a power of two; use 64 or 128",)


FEATURE = dsa_repair(
    "dsa-hadamard",
    summary="Rotates indexer queries and keys on any device and in any float type.",
    switch_help="Rotate in plain PyTorch where fast_hadamard_transform is missing or does not apply.",
    check=check_head_dim,
    megatron_flags=(megatron_flag("--dsa-indexer-head-dim", int),),
    patches=(
        Patch(
            f"{DSA}:rotate_activation",
            "wrap",
            f"{_HERE}.rotate:rotate_anywhere",
            "asserts bfloat16 and a CUDA-only package",
            params=("x",),
            versions=">=0.16,<0.21",
        ),
    ),
)
