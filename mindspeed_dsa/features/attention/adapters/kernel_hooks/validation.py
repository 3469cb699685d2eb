"""What fused DSA cannot do behind kernel hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa import versions
from mindspeed_dsa.features.attention.dsa.options import Options


def refusals(chosen: Options) -> list[str]:
    """Switches that Megatron-core 0.19 does not get; each with the way out."""
    if not chosen.fuse_kl_in_backward:
        return []
    return ["--dsa-fuse-kl-in-backward is made for Megatron-core 0.16 to 0.18; omit it"]


def check_kernel_hooks(args: Any) -> Sequence[str]:
    """:func:`refusals`, where the hooks are there."""
    release = versions.of_megatron(getattr(args, "megatron_root", "megatron")) or ""
    return refusals(Options.of(args)) if release.startswith("0.19.") else ()
