"""Logger of the package: standard ``logging`` with a filter by rank.

All records go to ``logging.getLogger("mindspeed_dsa")`` or to a child named after a feature. Levels, handlers
and formats are set there, as with any library; by default records of level INFO and above go to stderr.

Two additional keywords select the ranks that log, and how often::

    log.info("runs on %s", backend, once=True)          # not again in this process
    log.info("%s: %d chunks", layer, chunks, once=layer)  # once per layer, whatever the text
    log.info("swaps %d layers", count, ranks="stage")   # the first rank of each pipeline stage
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Hashable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

NAME = "mindspeed_dsa"

Ranks = Literal["first", "stage", "all"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
    _Handler = logging.StreamHandler[TextIO]
else:  # in Python 3.10 these classes are not subscriptable at run time
    _Adapter, _Handler = logging.LoggerAdapter, logging.StreamHandler

_already: set[Hashable] = set()
"""Keys of ``once`` records that have been logged."""


class Log(_Adapter):
    """Logger adapter with the keywords ``ranks`` and ``once``.

    Attributes:
        megatron_root: package whose ``core.parallel_state`` defines the pipeline stages.
    """

    def __init__(self, logger: logging.Logger, megatron_root: str = "megatron") -> None:
        super().__init__(logger, {})
        self.megatron_root = megatron_root

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        extra = {
            **(kwargs.get("extra") or {}),
            "ranks": kwargs.pop("ranks", "first"),
            "once": kwargs.pop("once", False),
            "megatron_root": self.megatron_root,
        }
        return msg, {**kwargs, "extra": extra}


class RankFilter(logging.Filter):
    """Filter by rank: passes records for this rank, and each ``once`` record only the first time."""

    def filter(self, record: logging.LogRecord) -> bool:
        ranks: Ranks = getattr(record, "ranks", "first")
        if ranks == "first" and not is_first_rank():
            return False
        if ranks == "stage" and not _is_first_of_stage(getattr(record, "megatron_root", "megatron")):
            return False
        once = getattr(record, "once", False)
        if not once:
            return True
        # once=True identifies the record by its text, any other value by that value.
        key = (record.name, record.getMessage() if once is True else once)
        if key in _already:
            return False
        _already.add(key)
        return True


def get(feature: str = "", megatron_root: str = "megatron") -> Log:
    """Return the package's logger, or the child logger of one feature."""
    logger = logging.getLogger(f"{NAME}.{feature}" if feature else NAME)
    # Handlers' filters would miss handlers that users add, and a parent's filters do not see a child's
    # records. So every logger gets the filter.
    if not any(isinstance(known, RankFilter) for known in logger.filters):
        logger.addFilter(RankFilter())
    return Log(logger, megatron_root)


def forget() -> None:
    """Forget which ``once`` records have been logged."""
    _already.clear()


def is_first_rank() -> bool:
    """Return whether this is the job's first rank, by ``RANK`` or else the process group."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]) == 0
    distributed = sys.modules.get("torch.distributed")  # if a process group exists, it is already imported
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank() == 0)


def _is_first_of_stage(megatron_root: str) -> bool:
    """Return whether this is the first rank of its pipeline stage, which logs for the stage."""
    # Looked up instead of imported, so that logging never imports torch.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    state = sys.modules.get(f"{megatron_root}.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return bool(distributed.get_rank() == 0)
    # The rank with tensor, context and data parallel rank 0 logs for its stage.
    replica = state.get_data_parallel_rank(with_context_parallel=True)
    return bool(replica == 0 and state.get_tensor_model_parallel_rank() == 0)


class _Stderr(_Handler):
    """Handler that writes to the current ``sys.stderr``, as ``logging.lastResort`` does."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(f"{NAME}: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _set_up() -> None:
    """Attach the default handler, unless the application has set this logger up already."""
    logger = logging.getLogger(NAME)
    if not logger.handlers:
        logger.addHandler(_Stderr())
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


_set_up()
