"""Flags for the YaRN fields of MLA configurations that Megatron's parser does not set.

The flags are named as in Megatron-core 0.19, which applies them only to attention without MLA.

tests: tests/matrix/test_latent_yarn.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.feature import Context, Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument, require
from mindspeed_dsa.megatron.dsa import megatron_flag
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch

ORIGINAL = Flag(
    "--yarn-original-max-position-embeddings",
    "Sequence length of the model's training before YaRN; YaRN computes its frequencies from it. Default: "
    "Megatron's, 4096. Before Megatron-core 0.14 use --max-position-embeddings instead.",
    kind="value",
    type=int,
)
BETA_FAST = Flag(
    "--yarn-beta-fast",
    "YaRN keeps the frequency of dimensions with at least so many turns within the original length. "
    "Default: Megatron's, 32.",
    kind="value",
    type=float,
)
BETA_SLOW = Flag(
    "--yarn-beta-slow",
    "YaRN divides the frequency of dimensions with at most so many turns within the original length by the "
    "scaling factor. Default: Megatron's, 1.",
    kind="value",
    type=float,
)
FIELDS: Mapping[str, str] = {
    flag.dest: flag.dest[len("yarn_") :] for flag in (ORIGINAL, BETA_FAST, BETA_SLOW)
}
"""Mapping from a flag's ``dest`` to the field of ``MLATransformerConfig``."""
_READS_THEM = SpecifierSet(">=0.19.dev0", prereleases=True)
_LACKS_ORIGINAL = SpecifierSet("<0.14", prereleases=True)


@dataclass(frozen=True)
class Options:
    """Requested YaRN options.

    Attributes:
        values: dict from field of ``MLATransformerConfig`` to requested value.
        release: release of Megatron-core; None without Megatron.
    """

    values: Mapping[str, Any]
    release: str | None

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings or a job's arguments."""
        said = {field: getattr(settings, dest, None) for dest, field in FIELDS.items()}
        return cls(
            values={field: value for field, value in said.items() if value is not None},
            release=versions.of_job(settings),
        )


def wanted(settings: Any) -> bool:
    """Return whether any of these flags is set."""
    return any(getattr(settings, dest, None) is not None for dest in FIELDS)


def check_yarn(args: Any, options: Options) -> Iterator[str]:
    """Yield problems of a job's arguments or a model's configuration."""
    names = [f"--yarn-{field.replace('_', '-')}" for field in options.values]
    for name, value in zip(names, options.values.values(), strict=True):
        if value <= 0:
            yield f"{name} {value}: use a number above 0"
    fast, slow = options.values.get("beta_fast", 32.0), options.values.get("beta_slow", 1.0)
    if fast < slow:
        yield f"{BETA_FAST.name} {fast} is below {BETA_SLOW.name} {slow}: fast dimensions make more turns"
    if argument(args, "multi_latent_attention") is False:
        if options.release is None or options.release not in _READS_THEM:
            yield (
                f"{', '.join(names)}: Megatron-core {options.release} has YaRN for latent attention alone; "
                "add --multi-latent-attention, omit them, or train with Megatron-core 0.19 or later"
            )
    elif argument(args, "rope_type") == "rope":
        yield f"{', '.join(names)}: --rope-type rope has no YaRN; use --rope-type yarn, or omit them"
    lacks = options.release is not None and options.release in _LACKS_ORIGINAL
    if lacks and "original_max_position_embeddings" in options.values:
        yield (
            f"{ORIGINAL.name}: Megatron-core {options.release} derives YaRN's frequencies of "
            "--max-position-embeddings; say it there, and omit this flag"
        )


def fill_yarn(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__`` to set YaRN fields that Megatron's parser does not pass.

    Classes derived from ``MLATransformerConfig`` have constructors of their own, which call this method, too.
    """

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        asked = {field: value for field, value in context.options.values.items() if field in defaults}
        for field, value in asked.items():
            passed = getattr(self, field)
            # Megatron may pass the default, which does not contradict the flag.
            if passed not in (value, defaults[field]):
                raise SettingsError(
                    f"mindspeed_dsa: {context.feature}: {type(self).__name__}: {field}={passed!r} is passed "
                    f"to it, and --yarn-{field.replace('_', '-')} says {value!r}: omit one of them"
                )
            setattr(self, field, value)
        original(self, *args, **kwargs)
        if "beta_fast" in defaults:
            require(context, check_yarn, self)

    return __post_init__


FEATURE = Feature(
    name="latent-yarn",
    summary="YaRN's original length and turns for latent attention, which Megatron's parser has no flag for.",
    flags=(
        ORIGINAL,
        BETA_FAST,
        BETA_SLOW,
        Flag("--multi-latent-attention", "Megatron's own flag.", megatron=True),
        megatron_flag("--rope-type"),
    ),
    active=wanted,
    options=Options.of,
    check=check_yarn,
    doc="latent-yarn.md",
    requires=Requires(versions={versions.MEGATRON_DISTRIBUTION: ">=0.12.1,<0.21"}),
    patches=(
        Patch(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            "wrap",
            "mindspeed_dsa.features.attention.latent_yarn.feature:fill_yarn",
            "Megatron's configuration has these fields, and its parser no flag that reaches them",
        ),
    ),
)
