"""The switches of overlapped tensor parallel communication, as implementations read them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

_HERE = "mindspeed_dsa.features.tensor_parallel"


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        chunks: how many; 0 measures.
        keep_gathered: column parallel layers keep the gathered input for backward.
        backend: name of the module that multiplies and communicates.
    """

    chunks: int
    keep_gathered: bool
    backend: str

    @property
    def module(self) -> Any:
        """The backend."""
        return import_module(f"{_HERE}.{self.backend}")

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
        """Whether matmul and collective are one operator, which knows its own chunks."""
        return self.backend != "chunked"


def _backend(settings: Any) -> str:
    if settings.use_ascend_mc2:
        return "mc2"
    return "symmetric" if settings.coc_fused_kernel else "chunked"


_latest: tuple[Any, Options] | None = None


def current() -> Options | None:
    """Those of the running session, if there is one."""
    global _latest
    from mindspeed_dsa import session

    running = session.current()
    if running is None:
        return None
    if _latest is None or _latest[0] is not running.settings:
        _latest = running.settings, Options.of(running.settings)
    return _latest[1]
