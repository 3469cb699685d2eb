"""Requirements and conflicts of the features that are on, all reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet

from mindspeed_dsa import versions
from mindspeed_dsa.declarations import Feature
from mindspeed_dsa.settings import Settings


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
                found.append(
                    f"{feature.name}{switch} needs {distribution} {wanted}, which is not installed; "
                    f"pip install '{distribution}{wanted}'"
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
