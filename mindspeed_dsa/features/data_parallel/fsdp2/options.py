"""What was asked for of FSDP2, by flags and by MindSpeed's configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.features.data_parallel.fsdp2.config_file import read


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        prefetch: units whose weights are gathered ahead of the one that computes.
        reduce_dtype: of sums of gradients, ``fp32`` or ``bf16``.
        param_dtype: that the file says weights have, ``fp32`` or ``bf16``; None: nothing.
        sharding_size: data parallel ranks that share one copy of the weights; None: all.
        reshard: drop gathered weights after forward, or keep them on so many ranks; None: as Megatron says.
        wrapped: classes of further units, ``"package.module.Class"``.
        ignored: classes of modules whose weights stay whole.
    """

    prefetch: int = 1
    reduce_dtype: str = "fp32"
    param_dtype: str | None = None
    sharding_size: int | None = None
    reshard: bool | int | None = None
    wrapped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings or from arguments; flags outrank the file."""
        path = getattr(settings, "fsdp2_config_path", None)
        found = read(path) if path else {}
        for name in ("prefetch", "reduce_dtype", "sharding_size"):
            if (value := getattr(settings, f"fsdp2_{name}", None)) is not None:
                found[name] = value
        return cls(**found)
