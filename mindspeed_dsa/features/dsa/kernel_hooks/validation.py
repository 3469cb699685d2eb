"""Options of fused DSA that the kernel hooks do not support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.patches import versions


def refusals(chosen: Options) -> list[str]:
    """Switches that are not supported from Megatron-core 0.19 on; each message includes a fix."""
    if not chosen.fuse_kl_in_backward:
        return []
    return ["--dsa-fuse-kl-in-backward requires Megatron-core 0.16 to 0.18; omit it"]


def check_kernel_hooks(args: Any) -> Sequence[str]:
    """:func:`refusals`, if this Megatron has the hooks."""
    release = versions.of_megatron(getattr(args, "megatron_root", "megatron"))
    has_hooks = release is not None and release in SpecifierSet(">=0.19", prereleases=True)
    return refusals(Options.of(args)) if has_hooks else ()
