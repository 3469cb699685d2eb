"""Options of grouped experts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

_LAYOUTS: dict[str, Literal["kn", "nk"]] = {"npu": "kn"}
"""By platform. Elsewhere a product reads either at the same speed, and ``nk`` is how checkpoints have it."""


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        layout: of each expert's matrix: ``[in, out]`` or ``[out, in]``.
        has_checkpoint: what Megatron recomputes activations with works here.
    """

    layout: Literal["kn", "nk"]
    has_checkpoint: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments, which know no platform."""
        layout: Literal["kn", "nk"] | None = getattr(settings, "gemm_weight_layout", None)
        if layout not in ("kn", "nk"):
            layout = _LAYOUTS.get(getattr(settings, "platform", ""), "nk")
        has_checkpoint = "recompute-outputs" in getattr(settings, "features_on", ()) or bool(
            find_spec("transformer_engine")
        )
        return cls(layout=layout, has_checkpoint=has_checkpoint)
