"""Checks of the active features and of a job's arguments. Every problem is reported at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa import features
from mindspeed_dsa.feature import Feature, Flag
from mindspeed_dsa.patches import versions
from mindspeed_dsa.settings import GENERAL_FLAGS, Setting, Settings

if TYPE_CHECKING:
    from mindspeed_dsa.patches.drift import Checker
    from mindspeed_dsa.patches.spec import Patch


def problems(active: Sequence[Feature], settings: Settings) -> list[str]:
    """Return every conflict and every unmet requirement of the active features, with a remedy."""
    messages: list[str] = []
    names = {feature.name for feature in active}
    for feature in active:
        who = _switched_on(feature, settings)
        requires = feature.requires
        if settings.platform not in requires.platforms:
            messages.append(
                f"{who} runs on {', '.join(requires.platforms)}, but this is platform "
                f"{settings.platform}; switch it off here"
            )
        for distribution, wanted in requires.versions.items():
            version = versions.of_distribution(distribution, settings.megatron_root)
            if version is None:
                ours = ", or name your fork's package with --megatron-root"
                messages.append(
                    f"{who} needs {distribution} {wanted}, which is not installed; "
                    f"pip install '{distribution}{wanted}'"
                    f"{ours if distribution == versions.MEGATRON_DISTRIBUTION else ''}"
                )
            # Pre-releases count, because branches and nightly builds have pre-release versions.
            elif not SpecifierSet(wanted).contains(version, prereleases=True):
                messages.append(
                    f"{who} needs {distribution} {wanted}, but {version} is installed; "
                    "install a release in that range or switch the feature off"
                )
        for package, command in requires.packages.items():
            if find_spec(package) is None:
                messages.append(f"{who} needs the package {package}: {command}")
        messages += [
            f"{who} cannot be combined with {conflict.feature}: {conflict.why}"
            for conflict in feature.conflicting(names, settings)
        ]
    return messages


def missing_features(active: Sequence[Feature], settings: Settings) -> list[str]:
    """Return a message for every feature that is off although an active feature requires it."""
    # Separate from problems(), because a job may still switch the feature on later, from code.
    names = {feature.name for feature in active}
    return [
        f"{_switched_on(feature, settings)} needs the feature {other}, {_how_to_get(other)}"
        for feature in active
        for other in feature.requires.features
        if other not in names
    ]


def outside_training_loop(active: Sequence[Feature], settings: Settings) -> list[str]:
    """Return a message for every feature of Megatron-LM's loop that a job with another loop switched on."""
    if f"{settings.megatron_root}.training" in sys.modules:
        return []
    explicit = settings.chosen()
    # A loop that parses our flags and variables, such as the examples', serves them by itself.
    return [
        f"{_switched_on(feature, settings)} works in Megatron-LM's own loop "
        "(megatron.training), which this job has not imported, and would do nothing; omit it (its page, "
        f"docs/features/{feature.doc}, says what serves other loops)"
        for feature in active
        if feature.in_training_loop
        and any(
            explicit[flag.dest].source == "API"
            for flag in feature.flags
            if flag.dest in explicit and not flag.megatron
        )
    ]


def _how_to_get(name: str) -> str:
    wanted = next((feature for feature in features.all_features() if feature.name == name), None)
    if wanted is None:
        return "which is not installed"
    if wanted.when:
        return f"which is on for {wanted.when}; train such a model, or omit the flag"
    own = [flag.name for flag in wanted.flags[:1] if not flag.megatron]
    return f"which is off; add {own[0]}" if own else f"which is off; see its page, {wanted.doc}"


def _switched_on(feature: Feature, settings: Settings) -> str:
    explicit = settings.chosen()
    setters = [explicit[flag.dest].who for flag in feature.flags if flag.dest in explicit]
    return f"{feature.label} (switched on by {', '.join(setters) or 'default'})"


def unheard(args: Any, armed: Settings, told: bool = False) -> Iterator[str]:
    """Yield a message for each flag whose value in the job's arguments differs from the session's value.

    Args:
        args: job's arguments.
        armed: session's settings.
        told: whether values from API and environment were already written into the arguments. Later changes
            of Megatron's own flags by Megatron are then not reported.
    """
    explicit = armed.chosen()
    for flag in features.all_flags():
        wanted = getattr(args, flag.dest, flag.unset)
        if flag.field:  # code that builds the model's configuration from other arguments reports it itself
            said = explicit.get(flag.dest)
            outside = said is not None and said.source in ("API", "environment") and hasattr(args, flag.dest)
            if said is not None and outside and not told and wanted != said.value:
                yield _told_apart(flag, wanted, said)
            continue
        # Our flag is in the arguments with another value: this session has read a different command line.
        if not flag.megatron:
            if wanted != flag.unset and wanted != getattr(armed, flag.dest):
                yield _told_apart(flag, wanted, armed.setting(flag.dest))
            continue
        setting = explicit.get(flag.dest)
        if setting is None or setting.source not in ("API", "environment"):
            continue
        if not hasattr(args, flag.dest):
            if setting.source == "environment":  # the API may set a value that the job has hard-coded
                yield without_effect(flag, setting)
        # Megatron would use the arguments' value and ignore the variable or the API.
        elif not told and _plain(wanted) != _plain(setting.value):
            yield _told_apart(flag, wanted, setting)


def idle(active: Sequence[Feature], settings: Settings) -> Iterator[str]:
    """Yield a message for each of our flags that was set although all features that read it are off."""
    read = {flag.dest for feature in active for flag in feature.flags}
    explicit = settings.chosen()
    for flag in features.all_flags():
        setting = explicit.get(flag.dest)
        if setting is None or flag.megatron or flag.dest in read:
            continue
        if setting.value is False or setting.value in (flag.unset, []):
            continue
        names = [feature.name for feature in features.all_features() if flag in feature.flags]
        yield f"{flag.name} has no effect without {' or '.join(names)}, which is off in this job"


def without_effect(flag: Flag, setting: Setting) -> str:
    """Return a message: a variable sets a Megatron flag, but the job's arguments lack this flag."""
    return (
        f"environment variable {setting.detail} is for Megatron's own {flag.name}, which this job does not "
        f"read; unset {flag.env}"
    )


def for_megatron(armed: Settings) -> dict[str, Any]:
    """Return the values of Megatron's own flags that API or environment set, by ``dest``."""
    explicit = armed.chosen()
    return {
        flag.dest: explicit[flag.dest].value
        for flag in features.all_flags()
        if flag.megatron and flag.dest in explicit and explicit[flag.dest].source in ("API", "environment")
    }


def not_passed_on(armed: Settings) -> list[str]:
    """Return a message for each Megatron flag set by a variable, if the job never reads our variables."""
    explicit = armed.chosen()
    return [
        f"environment variable {setting.detail} is for Megatron's own {flag.name}, and this job's arguments "
        "have not got it: they come neither from Megatron's parser nor through "
        f"mindspeed_dsa.apply_environment(args); unset {flag.env}, and set it where the job is configured"
        for flag in features.all_flags()
        if flag.megatron and (setting := explicit.get(flag.dest)) and setting.source == "environment"
    ]


def _told_apart(flag: Flag, wanted: Any, setting: Setting) -> str:
    difference = (
        f"the job's arguments have {flag.dest}={wanted!r}, and mindspeed_dsa was set up with "
        f"{setting.value!r} ({setting.who}): "
    )
    if setting.source == "environment":
        return (
            f"{difference}unset {flag.env}, or omit {flag.name}, or have the job call "
            "mindspeed_dsa.apply_environment(args) when it has parsed its arguments"
        )
    if setting.source == "API":
        return f"{difference}give the job's arguments and mindspeed_dsa.enable() the same value"
    return (
        f"{difference}arguments that do not come from the process's command line need "
        f"mindspeed_dsa.enable({flag.dest}={wanted!r})"
    )


def _plain(value: Any) -> Any:
    """Normalize a value for comparison: ``none``, False and ``[]`` to None, ``[x]`` to ``x``."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return value[0]
    return None if value in (False, "none", [], ()) else value


def with_own_switches(args: Any, armed: Settings) -> Any:
    """Return a view of a job's arguments in which our switches have the values of the settings.

    A field of the model's configuration that the settings leave open keeps the arguments' value.
    """
    explicit = armed.chosen()
    # The settings override the arguments, except for configuration fields that they leave open.
    own = [*GENERAL_FLAGS, *(flag for flag in features.all_flags() if not flag.megatron)]
    said = [flag for flag in own if not flag.field or flag.dest in explicit or not hasattr(args, flag.dest)]
    return _Overruled(args, {flag.dest: getattr(armed, flag.dest) for flag in said})


class _Overruled:
    def __init__(self, args: Any, own: Mapping[str, Any]) -> None:
        self._args, self._own = args, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._args, name)


def checker(root: str = "megatron") -> Checker:
    """Build a checker of patches against the installed sources of Megatron, or of the fork ``root``."""
    from mindspeed_dsa.patches.drift import Checker
    from mindspeed_dsa.patches.source_tree import SourceTree
    from mindspeed_dsa.session import records

    known = records.load().fingerprints()
    return Checker(SourceTree(), versions.of_megatron(root), known, root)


def static_check(root: str = "megatron") -> Callable[[Patch], tuple[list[str], list[str]]]:
    """Return the patch manager's source check: ``patch -> (problems, notes)``."""
    # The checker is built on first use: it reads the records and the sources.
    # Patches are checked one by one; the sources and records are read once.
    checker_once = cache(lambda: checker(root))
    return lambda patch: checker_once()(patch)
