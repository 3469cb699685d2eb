"""Options of compiled regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.patches.errors import SettingsError


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        bypass: operators that the compiler neither decomposes nor fuses, as they were written.
    """

    bypass: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Any) -> Options:
        """From resolved settings, or from arguments.

        Raises:
            SettingsError: a list without anything to compile.
        """
        bypass = tuple(getattr(settings, "compile_bypass", None) or ())
        if bypass and not getattr(settings, "compile_regions", False):
            raise SettingsError(
                f"--compile-bypass {' '.join(bypass)} does nothing without --compile-regions; add that, or "
                "omit it"
            )
        return cls(bypass)
