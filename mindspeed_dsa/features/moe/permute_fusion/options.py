"""The switches of the fused permutation, as implementations read them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.feature import Megatron


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        backend: of the operator; ``auto`` leaves Transformer Engine's kernels in place where they are.
    """

    backend: str

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        return cls(backend=getattr(settings, "moe_permute_backend", None) or "auto")

    @property
    def may_leave_it(self) -> bool:
        """Whether Transformer Engine's kernels are welcome."""
        return self.backend == "auto"

    def leaves_it_to_transformer_engine(self, megatron: Megatron) -> bool:
        """Whether Megatron has Transformer Engine's kernels and nobody asked for others."""
        if not self.may_leave_it or find_spec("transformer_engine") is None:
            return False
        try:
            extension = megatron("core.extensions.transformer_engine")
        except ImportError:
            return False
        return getattr(extension, "fused_unpermute", None) is not None
