"""Options of fused DSA that the kernel hooks do not support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_dsa import versions
from mindspeed_dsa.features.attention.dsa.options import Options


def refusals(chosen: Options) -> list[str]:
    """Switches that are not supported on Megatron-core 0.19; each message includes a fix."""
    if not chosen.fuse_kl_in_backward:
        return []
    return ["--dsa-fuse-kl-in-backward requires Megatron-core 0.16 to 0.18; omit it"]


def check_kernel_hooks(args: Any) -> Sequence[str]:
    """:func:`refusals`, if this Megatron has the hooks."""
    release = versions.of_megatron(getattr(args, "megatron_root", "megatron")) or ""
    return refusals(Options.of(args)) if release.startswith("0.19.") else ()
