"""What DSA's attention does under context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.context_parallel.algorithms import Algorithms
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

GATHER = "allgather"


@dataclass(frozen=True)
class Options(Algorithms):
    """The algorithms of a job's layers, which all gather keys."""

    @classmethod
    def of(cls, settings: Any) -> Self:
        """See :meth:`Algorithms.of`.

        Raises:
            SettingsError: also where somebody named another algorithm: each row of sparse attention chooses
                among the index keys of the whole sequence, so that they are on every rank first.
        """
        chosen = super().of(settings)
        # Arguments may have Megatron's default, which is changed later.
        if isinstance(settings, Settings) and chosen.all_of(GATHER) != {GATHER}:
            raise SettingsError(
                f"mindspeed_dsa: DSA's attention gathers keys, and {', '.join(chosen.names)} was named; use "
                "--context-parallel-algo kvallgather_cp_algo or --cp-comm-type allgather"
            )
        return chosen


def wanted(settings: Any) -> bool:
    """Whether a DSA model is trained on several context parallel ranks."""
    is_dsa = getattr(settings, "experimental_attention_variant", None) == "dsa"
    return is_dsa and (getattr(settings, "context_parallel_size", None) or 1) > 1
