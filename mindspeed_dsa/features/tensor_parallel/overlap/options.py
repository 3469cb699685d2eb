"""Options of overlapped tensor parallel communication."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

_BACKENDS = {
    "chunked": "mindspeed_dsa.parallel.chunked",
    "mc2": "mindspeed_dsa.features.tensor_parallel.overlap.mc2",
    "symmetric": "mindspeed_dsa.features.tensor_parallel.overlap.symmetric",
}


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        chunks: number of chunks; 0: tuned.
        keep_gathered: column parallel layers save the gathered input for backward.
        backend: implementation of matmul and collective, a name of :data:`_BACKENDS`.
    """

    chunks: int
    keep_gathered: bool
    backend: str

    @property
    def module(self) -> Any:
        """The backend."""
        return import_module(_BACKENDS[self.backend])

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings."""
        again = settings.coc_recompute_all_gather
        return cls(
            chunks=settings.coc_parallel_num or 0,
            keep_gathered=again is not None and not again,
            backend=_backend(settings),
        )

    @property
    def fused(self) -> bool:
        """Whether matmul and collective are one operator, which chooses its own chunks."""
        return self.backend != "chunked"


def _backend(settings: Any) -> str:
    if settings.use_ascend_mc2:
        return "mc2"
    return "symmetric" if settings.coc_fused_kernel else "chunked"
