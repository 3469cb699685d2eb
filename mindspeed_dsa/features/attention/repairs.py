"""Locations of DSA in Megatron, and helpers for the declarations of its fixes and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_dsa.declarations import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag, Requires, repair
from mindspeed_dsa.patches.spec import Patch

DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
MLA = "megatron.core.transformer.multi_latent_attention"
SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
FIXES = "mindspeed_dsa.features.attention.fixes"


def dsa_repair(
    name: str,
    summary: str,
    switch_help: str,
    patches: Sequence[Patch],
    validate: Callable[[Any], Sequence[str]] | None = None,
    megatron_flags: Sequence[Flag] = (),
    options: Callable[[Any], Any] | None = None,
    supplies: Sequence[str] = (),
) -> Feature:
    """A fix for Megatron's DSA: on if the model uses DSA, unless its switch overrides this.

    The rows' ``versions`` exclude releases that have fixed the defect.
    """
    switch = Flag(f"--{name}", f"{switch_help} Default: on if the model uses DSA.", kind="auto")
    feature = Feature(
        name=name,
        summary=summary,
        flags=(switch, EXPERIMENTAL_ATTENTION_VARIANT, *megatron_flags),
        patches=tuple(patches),
        active=repair(switch.dest),
        options=options,
        supplies=tuple(supplies),
        doc=f"{name}.md",
    )
    return feature if validate is None else replace(feature, validate=validate)


def dsa_option(name: str, summary: str, switch: Flag, versions: str, patches: Sequence[Patch]) -> Feature:
    """An option that Megatron's releases in ``versions`` do not offer; off by default."""
    return Feature(
        name=name,
        summary=summary,
        flags=(switch, EXPERIMENTAL_ATTENTION_VARIANT),
        patches=tuple(patches),
        requires=Requires(versions={"megatron-core": versions}),
        doc=f"{name}.md",
    )


def megatron_flag(name: str, type: Callable[[str], Any] = str) -> Flag:
    """One of Megatron's own flags that a check reads."""
    return Flag(name, "Megatron's own flag.", kind="value", type=type, megatron=True)
