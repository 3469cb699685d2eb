"""Options of moe-fb-overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from mindspeed_dsa.patches import versions


@dataclass(frozen=True)
class Options:
    """What the installed release can do.

    Attributes:
        counts_uses: overlapped reduction knows parameters that two backwards of a microbatch use.
    """

    counts_uses: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        release = versions.of_megatron(getattr(settings, "megatron_root", "megatron"))
        return cls(counts_uses=release is None or Version(release) >= Version("0.16.0"))
