"""Repairs of Megatron's own DSA: flag, argument checks and feature."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag
from mindspeed_dsa.features.dsa.repairs.rows import HADAMARD, LOCAL_PROVIDER, REPAIRS, SPEC_DISPATCH
from mindspeed_dsa.megatron.configuration import argument, hybrid_flag
from mindspeed_dsa.megatron.dsa import SIZES, megatron_flag, uses_dsa
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch


def repair_names(text: str) -> str:
    """Parse a comma-separated list of repair names; return it without spaces.

    Raises:
        argparse.ArgumentTypeError: a name is unknown.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known_names = [repair.name for repair in REPAIRS]
    if unknown := [name for name in names if name not in known_names]:
        raise argparse.ArgumentTypeError(
            f"no repair is called {', '.join(unknown)}; choose among {', '.join(known_names)}"
        )
    return ",".join(names)


LEFT_OUT = Flag(
    "--no-dsa-repairs",
    "For debugging: leave out these repairs of Megatron's DSA, separated by commas: "
    f"{', '.join(repair.name for repair in REPAIRS)}.",
    kind="value",
    type=repair_names,
    metavar="NAME,...",
)


@dataclass(frozen=True)
class Options:
    """Options of the repairs.

    Attributes:
        left_out: names of repairs to leave out.
        groups_experts: whether Megatron's local spec provider supports ``--moe-grouped-gemm`` without the
            grouped_gemm package.
    """

    left_out: frozenset[str]
    groups_experts: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings."""
        left_out = (argument(settings, LEFT_OUT.dest) or "").split(",")
        features_on = getattr(settings, "features_on", ())
        return cls(left_out=frozenset(left_out), groups_experts="moe-grouped-gemm" in features_on)


_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")


def has_dsa_layers(settings: Any) -> bool:
    """Return whether the model has DSA layers, also in a hybrid pattern."""
    return uses_dsa(settings) or any("D" in (argument(settings, name) or "") for name in _PATTERNS)


def rows(settings: Any) -> tuple[Patch, ...]:
    """Return the patches of all repairs except those in ``--no-dsa-repairs``."""
    left_out = Options.of(settings).left_out
    return tuple(patch for repair in REPAIRS if repair.name not in left_out for patch in repair.patches)


def without_transformer_engine(args: Any) -> Sequence[str]:
    """Report if Transformer Engine is missing but the job uses it."""
    if getattr(args, "transformer_impl", None) != "transformer_engine" or find_spec("transformer_engine"):
        return ()
    problem = (
        "--transformer-impl transformer_engine (Megatron's default) needs Transformer Engine, which is not "
        "installed; add --transformer-impl local"
    )
    return (problem,)


def without_sizes(args: Any) -> Sequence[str]:
    """Report sizes that are None, and options that DSA does not support; skip those that ``args`` lacks."""
    if not uses_dsa(args):
        return ()
    problems = [
        f"DSA needs --{name.replace('_', '-')}; DeepSeek-V3.2 has {usual}"
        for name, usual in SIZES.items()
        if getattr(args, name, usual) is None
    ]
    if not getattr(args, "multi_latent_attention", True):
        problems.append("DSA is built on latent attention; add --multi-latent-attention")
    for name in ("qk_clip", "log_max_attention_logit"):
        if argument(args, name):
            problems.append(
                f"--{name.replace('_', '-')} reads the largest logits after a step, and sparse attention "
                "keeps none; omit it"
            )
    head, rotary = argument(args, "dsa_indexer_head_dim"), argument(args, "qk_pos_emb_head_dim")
    if head is not None and rotary is not None and head < rotary:
        problems.append(
            f"--dsa-indexer-head-dim {head} has no room for the --qk-pos-emb-head-dim {rotary} in "
            "it; make it at least as large"
        )
    return problems


def keep_rope_unfused(args: Any) -> Sequence[str]:
    """Switch off ``apply_rope_fusion``, which Megatron's DSA lacks before 0.19; a ``Feature.rewrite``.

    Megatron's default is True, so most jobs have not asked for fusion. Results are the same without it.
    """
    if SPEC_DISPATCH.name in Options.of(args).left_out:
        return ()
    release = versions.of_job(args)
    lacks_it = release is not None and release in SpecifierSet("<0.19", prereleases=True)
    if not (lacks_it and uses_dsa(args) and argument(args, "apply_rope_fusion")):
        return ()
    args.apply_rope_fusion = False
    return (
        f"apply_rope_fusion is False (--no-rope-fusion): DSA has no fused RoPE in Megatron-core {release}",
    )


def cannot_rotate(args: Any) -> Sequence[str]:
    """Report an indexer head size that is not a power of two, if the Hadamard rotation is on."""
    size = getattr(args, "dsa_indexer_head_dim", None)
    if size is None or (size > 0 and size & (size - 1) == 0):
        return ()
    if argument(args, "dsa_indexer_rotate_activation") is False:
        return ()
    problem = (
        f"--dsa-indexer-head-dim {size}: the Hadamard rotation needs a power of two; use 64 or 128, or add "
        "--no-dsa-indexer-rotate-activation"
    )
    return (problem,)


def check_repairs(args: Any, options: Options) -> Iterator[str]:
    """Yield problems with a job's arguments under the active repairs."""
    # Megatron sets the variant of such a model itself, but after features are chosen.
    is_repaired = any(repair.name not in options.left_out for repair in REPAIRS)
    if is_repaired and has_dsa_layers(args) and not uses_dsa(args):
        yield (
            f"{hybrid_flag(args)} has DSA layers (D), which are repaired only with "
            "--experimental-attention-variant dsa; add it"
        )
    checks = {
        LOCAL_PROVIDER: without_transformer_engine,
        SPEC_DISPATCH: without_sizes,
        HADAMARD: cannot_rotate,
    }
    for repair, problems in checks.items():
        if repair.name not in options.left_out:
            yield from problems(args)


FEATURE = Feature(
    name="dsa-repairs",
    summary="Repairs Megatron's own DSA: model specs, losses, gradients and recomputation.",
    flags=(
        LEFT_OUT,
        EXPERIMENTAL_ATTENTION_VARIANT,
        megatron_flag("--transformer-impl"),
        megatron_flag("--dsa-indexer-head-dim", int),
        megatron_flag("--hybrid-layer-pattern"),
        megatron_flag("--hybrid-override-pattern"),
    ),
    patches=tuple(patch for repair in REPAIRS for patch in repair.patches),
    rows=rows,
    active=has_dsa_layers,
    options=Options.of,
    rewrite=keep_rope_unfused,
    check=check_repairs,
    when="models that use DSA",
    doc="dsa-repairs.md",
)
