"""What is wrong with the features that are on, or with a job's arguments, all reported at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa import features, versions
from mindspeed_dsa.declarations import Feature
from mindspeed_dsa.settings import GENERAL_FLAGS, Settings


def mindspeed() -> str | None:
    """What to do about patches that MindSpeed has put into this process, or None where there are none.

    Both libraries patch the same functions and know flags of the same names.
    """
    manager = getattr(sys.modules.get("mindspeed.patch_utils"), "MindSpeedPatchesManager", None)
    patched = getattr(manager, "patches_info", None)
    if not patched:
        return None
    return (
        f"mindspeed_dsa: MindSpeed has patched {len(patched)} functions of this process, and only one of the "
        "two libraries can be in it: remove `import mindspeed.megatron_adaptor` (or that of mindspeed_llm) "
        "from the training script, see docs/migrate.md, or train without mindspeed_dsa"
    )


def problems(active: Sequence[Feature], settings: Settings) -> list[str]:
    """Every unmet requirement and every conflict, each with a fix."""
    found: list[str] = []
    names = {feature.name for feature in active}
    for feature in active:
        switch = f" (switched on by {_who(feature, settings)})"
        if feature.distribution:
            switch = f" (plug-in {feature.distribution}){switch}"
        requires = feature.requires
        if settings.platform not in requires.platforms:
            found.append(
                f"{feature.name}{switch} runs on {', '.join(requires.platforms)}, but this is platform "
                f"{settings.platform}; switch it off here"
            )
        for distribution, wanted in requires.versions.items():
            version = versions.of_distribution(distribution, settings.megatron_root)
            if version is None:
                ours = ", or name your fork's package with --megatron-root"
                found.append(
                    f"{feature.name}{switch} needs {distribution} {wanted}, which is not installed; "
                    f"pip install '{distribution}{wanted}'"
                    f"{ours if distribution == versions.MEGATRON_DISTRIBUTION else ''}"
                )
            elif not SpecifierSet(wanted).contains(version, prereleases=True):
                found.append(
                    f"{feature.name}{switch} needs {distribution} {wanted}, but {version} is installed; "
                    "install a release in that range or switch the feature off"
                )
        for package, command in requires.packages.items():
            if find_spec(package) is None:
                found.append(f"{feature.name}{switch} needs the package {package}: {command}")
        for other in requires.features:
            if other not in names:
                found.append(f"{feature.name}{switch} needs the feature {other}; switch it on too")
        for conflict in feature.conflicts:
            if conflict.feature in names:
                found.append(
                    f"{feature.name}{switch} cannot be combined with {conflict.feature}: {conflict.why}"
                )
    return found


def _who(feature: Feature, settings: Settings) -> str:
    chosen = settings.chosen()
    setters = [chosen[flag.dest].who for flag in feature.flags if flag.dest in chosen]
    return ", ".join(setters) if setters else "default"


def unheard(args: Any, armed: Settings) -> Iterator[str]:
    """Switches that a job's parser has read but the session has not: they would silently have no effect."""
    for flag in features.all_flags():
        wanted = getattr(args, flag.dest, flag.unset)
        if flag.megatron or wanted == flag.unset or wanted == getattr(armed, flag.dest):
            continue
        yield (
            f"the job's arguments have {flag.dest}={wanted!r}, and mindspeed_dsa was set up with "
            f"{getattr(armed, flag.dest)!r} ({armed.setting(flag.dest).who}). API and environment override "
            "the command line, which is the process's own; where the arguments come from elsewhere, call "
            f"mindspeed_dsa.enable({flag.dest}={wanted!r})"
        )


def with_own_switches(args: Any, armed: Settings) -> Any:
    """A view of a job's arguments in which our switches have the values of the settings."""
    own = [*GENERAL_FLAGS, *(flag for flag in features.all_flags() if not flag.megatron)]
    return _Overruled(args, {flag.dest: getattr(armed, flag.dest) for flag in own})


class _Overruled:
    def __init__(self, args: Any, own: Mapping[str, Any]) -> None:
        self._args, self._own = args, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._args, name)
