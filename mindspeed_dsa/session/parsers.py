"""The flags of all features on a job's own parser."""

from __future__ import annotations

import argparse
from typing import NoReturn

from mindspeed_dsa import features, settings


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of all features to any argparse parser, and suggestions for misspelt ones."""
    settings.add_flags(parser, "mindspeed_dsa", settings.GENERAL_FLAGS)
    for feature in features.all_features():
        settings.add_flags(parser, f"mindspeed_dsa: {feature.name}", feature.flags)
    known = features.all_flags()
    plain_error = parser.error

    def error(message: str) -> NoReturn:
        hints = settings.near_misses(message.split(), known)
        message += "".join(f" ({typed}: did you mean {meant}?)" for typed, meant in hints.items())
        if message.startswith("unrecognized"):
            message += "".join(f" ({plugin.message})" for plugin in features.broken_plugins())
        plain_error(message)

    parser.error = error  # type: ignore[method-assign]
    return parser
