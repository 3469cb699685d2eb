"""``features``: all features with their switches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mindspeed_dsa import features
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.session import start_report


def run(argv: Sequence[str]) -> int:
    """Print the list."""
    argparse.ArgumentParser(
        prog="python -m mindspeed_dsa features", description="Lists all features with their switches."
    ).parse_args(list(argv))
    rows = [("feature", "switch", "megatron-core", "what it does")]
    rows += [(f.label, _switch(f), _range(f), f.summary) for f in features.all_features()]
    print("\n".join(start_report.aligned(rows)))
    print("\n`python -m mindspeed_dsa explain NAME` says more about one of them.")
    for plugin in features.broken_plugins():
        print(f"\nPROBLEM: {plugin.message}")
    return 0


def _switch(feature: Feature) -> str:
    own = [flag for flag in feature.flags if not flag.megatron]
    return own[0].name if own else "(automatic)"


def _range(feature: Feature) -> str:
    if "megatron-core" in feature.requires.versions:
        return feature.requires.versions["megatron-core"]
    ranges = list(dict.fromkeys(patch.versions for patch in feature.patches))
    return " or ".join(ranges) if ranges and all(ranges) else "any"
