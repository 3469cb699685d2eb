"""Two sides of a comparison: the flags that each appends to the job's command line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_dsa import features, settings
from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.patches.errors import SettingsError


@dataclass(frozen=True)
class Sides:
    """Flags of the two compared sides A and B, and the features that are off in A and on in B."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    features: tuple[str, ...] = ()

    def flags(self, side: str) -> tuple[str, ...]:
        """Return the flags of side ``A`` or ``B``."""
        return self.a if side == "A" else self.b


def of_features(
    names: Sequence[str],
    command: Sequence[str],
    on_by_default: Sequence[str] = (),
) -> Sides:
    """Return the sides of a comparison that switches features off in A and on in B.

    Args:
        names: names of the features.
        command: job's own command line; neither it nor the environment may set the features.
        on_by_default: switches that the job sets unless ``--no-...`` is given.

    Raises:
        SettingsError: the features cannot be compared; lists all reasons.
    """
    by_name = {feature.name: feature for feature in features.all_features()}
    a: list[str] = []
    b: list[str] = []
    problems = []
    for name in dict.fromkeys(names):
        if name not in by_name:
            problems.append(_unknown(name, by_name))
            continue
        switch = _switch(by_name[name])
        if switch is None:
            problems.append(
                f"{name} has no on/off switch; compare two values of its flag, or of the flag that controls "
                "it, with --a and --b"
            )
            continue
        b.append(switch.name)
        if switch.kind == "auto" or switch.name in on_by_default:
            # Otherwise the feature may be on in A, by the platform or by the job itself.
            a.append(f"--no-{switch.name[2:]}")
        problems += _set_elsewhere(switch, command)
    if problems:
        raise SettingsError("mindspeed_dsa compare: " + "\n  - ".join(["--features:", *problems]))
    return Sides(tuple(a), tuple(b), tuple(dict.fromkeys(names)))


def of_flags(a: str, b: str) -> Sides:
    """Return the sides of a comparison of two strings of flags, each split into words as a shell does.

    Raises:
        SettingsError: a string cannot be split, or has a misspelt flag of this library or one that the
            environment overrides.
    """
    problems = []
    sides = []
    for name, text in (("--a", a), ("--b", b)):
        try:
            sides.append(tuple(shlex.split(text)))
        except ValueError as error:
            raise SettingsError(f"mindspeed_dsa compare: {name} {text!r} cannot be read: {error}") from None
    flags = [flag for flag in features.all_flags() if not flag.megatron]
    tokens = [token.partition("=")[0] for side in sides for token in side]
    misspelt = settings.near_misses(tokens, flags)
    problems += [
        f"{typed} is not a flag of this library; did you mean {meant}?" for typed, meant in misspelt.items()
    ]
    for flag in flags:
        if flag.env in os.environ and {flag.name, f"--no-{flag.name[2:]}", *flag.aliases} & set(tokens):
            problems.append(_outranked(flag))
    if problems:
        raise SettingsError("mindspeed_dsa compare: " + "; ".join(problems))
    return Sides(*sides)


def _switch(feature: Feature) -> Flag | None:
    flag = feature.flags[0] if feature.flags else None
    return flag if flag is not None and flag.kind in ("bool", "auto") and not flag.megatron else None


def _set_elsewhere(switch: Flag, command: Sequence[str]) -> list[str]:
    problems = []
    if switch.env in os.environ:
        problems.append(_outranked(switch))
    seen = {switch.name, *switch.aliases, f"--no-{switch.name[2:]}"} & {t.partition("=")[0] for t in command}
    if seen:
        problems.append(f"the job's own command has {', '.join(sorted(seen))}; remove it, compare adds it")
    return problems


def _outranked(flag: Flag) -> str:
    return f"the environment sets {flag.env}, which would override {flag.name} on both sides; unset it"


def _unknown(name: str, known: Mapping[str, Feature]) -> str:
    # A user may give the flag's name instead of the feature's.
    by_flag = {flag.name: f.name for f in known.values() for flag in f.flags[:1] if not flag.megatron}
    if name in by_flag:
        return f"{name} is a flag; its feature is {by_flag[name]}"
    if removed := settings.way_out([name]):
        return removed[0]
    hint = settings.did_you_mean(name, known)
    return f"there is no feature {name!r}{hint} (`python -m mindspeed_dsa features` lists them all)"
