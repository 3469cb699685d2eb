"""Options of host-profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError

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
