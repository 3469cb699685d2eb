"""The quotas of moments in mapped host memory, as implementations read them."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

_GIB = 2**30


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        words: of the flag, for all pipeline stages or for each of them; none where it is not set.
    """

    words: tuple[str | float, ...]

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments."""
        words = getattr(settings, "virtual_optimizer", None)
        if words is None:
            return cls(())
        return cls((words,) if isinstance(words, (str, int, float)) else tuple(words))

    def quota(self, stage: int, stages: int) -> float:
        """Bytes that a process may keep on the host.

        Args:
            stage: the process's pipeline stage.
            stages: how many there are.

        Raises:
            ValueError: a quota that is none, or neither one nor one for each stage.
        """
        quotas = [gibibytes(word) for word in self.words]
        if len(quotas) not in (1, stages):
            raise ValueError(
                f"--virtual-optimizer has {len(quotas)} quotas for {stages} pipeline stages; give one for "
                "all of " + ("them" if stages == 1 else f"them, or {stages}")
            )
        return quotas[stage if len(quotas) > 1 else 0] * _GIB


def gibibytes(word: str | float) -> float:
    """A quota: ``all``, or a number of GiB.

    Raises:
        ValueError: it is neither.
    """
    quota = math.nan
    with contextlib.suppress(ValueError):
        quota = math.inf if word == "all" else float(word)
    if not quota > 0 or (quota == math.inf and word != "all"):
        raise ValueError(f"--virtual-optimizer {word}: give 'all' or a number of GiB above 0 as quota")
    return quota
