"""What the host does in one training step, by class of module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch

STEP = 4
"""Recorded by default: the first ones allocate memory and compile."""


@dataclass(frozen=True)
class Options:
    """The requested settings.

    Attributes:
        file: where the record goes.
        step: which training step of the run is recorded, from 1.
        features_on: names of the features that are on.
    """

    file: Path
    step: int
    features_on: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings.

        Raises:
            SettingsError: a step without a file.
        """
        file, step = settings.host_profile, settings.host_profile_step
        if file is None:
            raise SettingsError(
                f"--host-profile-step {step} records nothing without --host-profile; name a file with that, "
                "or omit it"
            )
        found = tuple(getattr(settings, "features_on", ()) or ())
        return cls(file=Path(file), step=STEP if step is None else step, features_on=found)


def profile_wanted(settings: Any) -> bool:
    """Whether a file is named, or a step, which is refused without one."""
    return settings.host_profile is not None or settings.host_profile_step is not None


def check_profile(args: Any, options: Any) -> list[str]:
    """Steps that the run reaches, and a file that can be one."""
    return list(_problems(args))


def _problems(args: Any) -> Iterator[str]:
    step, last = Options.of(args).step, getattr(args, "train_iters", None)
    if step < 1:
        yield f"--host-profile-step is {step}; steps of a run are counted from 1"
    elif last is not None and step >= last:
        yield (
            f"--host-profile-step {step} and the step after it are never reached: --train-iters is {last}; "
            "make more steps, or name an earlier one"
        )
    if Path(args.host_profile).is_dir():
        yield f"--host-profile {args.host_profile} is a folder; name a file"


FEATURE = Feature(
    name="host-profile",
    summary="Records host time, operators and synchronisations of one training step by class of module.",
    flags=(
        Flag(
            "--host-profile",
            "Write what the host does in one training step to FILE, from rank 0; "
            "`python -m mindspeed_dsa host-profile -- COMMAND` sets it and prints the file.",
            kind="value",
            metavar="FILE",
        ),
        Flag(
            "--host-profile-step",
            "The step that is recorded, counted from 1 in this run, and timed by function in the next one; "
            "default: 4.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "wrap",
            "mindspeed_dsa.features.diagnostics.host_profile.recorder:record_steps",
            "a step of the schedule begins and ends here",
        ),
    ),
    active=profile_wanted,
    options=Options.of,
    check=check_profile,
    doc="host-profile.md",
)
