"""Declaration of virtual-optimizer: Adam's moments in host memory that the device addresses directly."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.memory.conditions import check_moved_adam
from mindspeed_dsa.megatron import optimizer, releases
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.optimizer import Hook

_GIB = 2**30


@dataclass(frozen=True)
class Options:
    """Options of ``--virtual-optimizer``.

    Attributes:
        words: values of the flag, one for all pipeline stages or one per stage; empty if unset.
    """

    words: tuple[str | float, ...]

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build the options from resolved settings or from parsed arguments."""
        words = getattr(settings, "virtual_optimizer", None)
        if words is None:
            return cls(())
        return cls((words,) if isinstance(words, (str, int, float)) else tuple(words))

    def quota(self, stage: int, stages: int) -> float:
        """Return the quota of a process in bytes of host memory.

        Args:
            stage: pipeline stage of the process.
            stages: number of pipeline stages.

        Raises:
            ValueError: a quota is invalid, or there is neither one quota nor one per stage.
        """
        quotas = [gibibytes(word) for word in self.words]
        if len(quotas) not in (1, stages):
            raise ValueError(
                f"--virtual-optimizer has {len(quotas)} quotas for {stages} pipeline stages; give one for "
                "all of " + ("them" if stages == 1 else f"them, or {stages}")
            )
        return quotas[stage if len(quotas) > 1 else 0] * _GIB


def gibibytes(word: str | float) -> float:
    """Parse a quota: ``all``, or a number of GiB.

    Raises:
        ValueError: ``word`` is neither.
    """
    quota = math.nan
    with contextlib.suppress(ValueError):
        quota = math.inf if word == "all" else float(word)
    if not quota > 0 or (quota == math.inf and word != "all"):
        raise ValueError(f"--virtual-optimizer {word}: give 'all' or a number of GiB above 0 as quota")
    return quota


def check_mapped_moments(args: Any, options: Options) -> Iterator[str]:
    """Yield arguments or optimizer settings that conflict with ``--virtual-optimizer``."""
    yield from check_moved_adam(args, "--virtual-optimizer")
    sends = argument(args, "async_save") and argument(args, "use_persistent_ckpt_worker")
    if sends and platforms.current().name == "cuda":
        # torch shares only memory of its own allocator, and the thread that sends it drops the error.
        yield (
            "--virtual-optimizer does not combine with --use-persistent-ckpt-worker: its moments cannot be "
            "sent to the process that saves, and the job would wait forever; omit --async-save"
        )
    yield from check_quotas(args, options)


def check_quotas(args: Any, options: Options) -> Iterator[str]:
    """Yield an error for invalid quotas, or for a number of quotas that does not fit the pipeline stages."""
    # `args` may lack the number of stages, then only the quotas themselves are checked.
    if options.words:
        try:
            options.quota(0, argument(args, "pipeline_model_parallel_size") or len(options.words))
        except (TypeError, ValueError) as error:
            yield str(error)


_COPIES = "on NPUs moments cannot be copied as they are"

FEATURE = Feature(
    name="virtual-optimizer",
    summary="Keeps Adam's moments in host memory that the device addresses directly, within a quota.",
    flags=(
        Flag(
            "--virtual-optimizer",
            "Keep Adam's moments in host memory: 'all', or GiB per process, or one number of GiB for each "
            "pipeline stage. Saves up to 8 bytes of device memory per parameter.",
            kind="value",
            nargs="+",
            metavar="GIB",
        ),
    ),
    patches=optimizer.rows(
        "mindspeed_dsa.features.memory.virtual_optimizer.mapped_moments:MappedMoments",
        Hook("built", "the moments get their places before the first step"),
        Hook("step", "an optimizer makes moments of its own for parameters that have none"),
        Hook("state_dict", _COPIES),
        Hook("load_state_dict", "moments are copied to their places, not to the device first"),
        Hook("get_parameter", _COPIES),
        Hook("set_parameter", _COPIES),
        Hook("load_parameters", _COPIES),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    conflicts=(
        Conflict(
            "swap-optimizer",
            "both features move the moments to the host; use --swap-optimizer for the least device memory, "
            "or --virtual-optimizer to keep the optimizer's own step",
        ),
    ),
    active=lambda settings: getattr(settings, "virtual_optimizer", None) is not None,
    options=Options.of,
    check=check_mapped_moments,
    doc="virtual-optimizer.md",
)
