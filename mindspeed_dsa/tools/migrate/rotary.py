"""Translation rule for scaled rotary embeddings: Llama 3 and YaRN."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mindspeed_dsa.features.attention.latent_yarn.feature import BETA_FAST, BETA_SLOW, ORIGINAL
from mindspeed_dsa.tools.migrate.job import LATENT, Given, Job, equal, made

_KIND, _FACTOR = "--rope-scaling-type", "--rope-scaling-factor"
_ORIGINAL, _TRAINED = "--rope-scaling-original-max-position-embeddings", "--max-position-embeddings"
_SCALE, _ALL_DIMS = "--rope-scaling-mscale", "--rope-scaling-mscale-all-dim"
_TURNS = {
    "--beta-fast": (BETA_FAST.name, 32),
    "--rope-scaling-beta-fast": (BETA_FAST.name, 32),
    "--beta-slow": (BETA_SLOW.name, 1),
    "--rope-scaling-beta-slow": (BETA_SLOW.name, 1),
}
"""Dict from MindSpeed-LLM's flag to this library's flag and Megatron's default."""
_DEFAULT_FACTOR = "8.0"
"""Default of Megatron's ``--rope-scaling-factor``, which MindSpeed-LLM also uses for YaRN."""


def rotate(job: Job) -> None:
    """Translate scaled rotary embeddings; Megatron uses ``--rope-scaling-factor`` for Llama 3 only."""
    kind = job.text(_KIND)
    if kind == "llama3":
        usual = {"--low-freq-factor": 1, "--high-freq-factor": 4, "--original-max-position-embeddings": 8192}
        _only_usual(job, usual)
        job.becomes(_KIND, [made("--use-rope-scaling")])
    elif kind == "yarn":
        _yarn(job)
    elif kind:
        job.is_dropped(_KIND, f"Megatron has no rotary embedding of kind {kind}.", results=True)
    elif _FACTOR in job and "--use-rope-scaling" not in job:
        job.is_kept(_FACTOR, "unchanged", "Without effect, as there: no scaling is asked for.")


def _is(text: str, value: float) -> bool:
    """Return whether a flag's text is this number; False for a shell variable."""
    return re.fullmatch(r"\d+(\.\d*)?", text) is not None and float(text) == value


def _only_usual(job: Job, usual: Mapping[str, float]) -> None:
    for flag, value in usual.items():
        if flag not in job:
            continue
        if _is(job.text(flag), value):
            job.is_dropped(flag, f"Megatron's --use-rope-scaling has this value, {value}.")
        else:
            why = f"Megatron's --use-rope-scaling has {value} and no flag for it."
            job.is_dropped(flag, why, results=True)


def _yarn(job: Job) -> None:
    if not LATENT & set(job.given):
        why = "Megatron has YaRN for latent attention, and for others since 0.19 only."
        job.is_dropped(_KIND, why, results=True)
        return
    job.is_dropped(_KIND, "Megatron's latent attention has YaRN in any case; a factor of 1 switches it off.")
    _original_length(job)
    for flag, (name, usual) in _TURNS.items():
        if flag in job and _is(job.text(flag), usual):
            job.is_dropped(flag, f"Megatron's latent attention has this value, {usual}.")
        elif flag in job:
            given = job.given[flag]
            job.becomes(
                flag, [Given(name, given.values, given.written)], "Megatron has a field, and no flag."
            )
    owner = _FACTOR if _FACTOR in job else _KIND
    factor = job.given[_FACTOR] if _FACTOR in job else made(_FACTOR, _DEFAULT_FACTOR)
    job.overrides(
        owner,
        Given("--rotary-scaling-factor", factor.values, factor.written),
        "Megatron's --rope-scaling-factor is Llama 3's.",
    )
    _magnitudes(job)


def _original_length(job: Job) -> None:
    """Translate YaRN's original context length to the flag that the Megatron release has for it."""
    if _ORIGINAL not in job:
        return
    length = job.given[_ORIGINAL]
    if job.before("0.14"):
        # With rotary embeddings, these releases read --max-position-embeddings for YaRN only.
        new, why = _TRAINED, "Megatron-core before 0.14 reads it there."
        job.overrides(_ORIGINAL, Given(new, length.values, length.written), why)
    elif _is(job.text(_ORIGINAL), 4096):
        job.is_dropped(_ORIGINAL, "Megatron's latent attention has this value, 4096.")
    else:
        now = [Given(ORIGINAL.name, length.values, length.written)]
        job.becomes(_ORIGINAL, now, "Megatron has a field, and no flag.")


def _magnitudes(job: Job) -> None:
    """Translate YaRN's magnitude of cos and sin (``mscale``) and of attention scores (``mscale_all_dim``)."""
    scale, all_dims = job.text(_SCALE, "1.0"), job.text(_ALL_DIMS, "0.0")
    if "--enable-dsa-indexer" in job and "--apply-rope-no-in-complex" not in job:
        if not equal([scale], [all_dims]):
            # MindSpeed-LLM multiplies by cos + i sin there, without the factor mscale / mscale_all_dim. Equal
            # values make Megatron's factor 1.
            why = (
                "With DSA MindSpeed-LLM rotates without YaRN's magnitude, unless --apply-rope-no-in-complex."
            )
            job.overrides(_SCALE if _SCALE in job else _KIND, made("--mscale", all_dims), why)
            if _ALL_DIMS not in job and job.before("0.14"):
                job.overrides(_KIND, made("--mscale-all-dim", all_dims), why)
        scale = all_dims
    if job.before("0.14") and not equal([scale], [all_dims]):
        said = [flag for flag in (_SCALE, _ALL_DIMS) if flag in job] or [_KIND]
        for flag in said:
            why = "Megatron-core before 0.14 scales attention with --mscale for both."
            job.is_dropped(flag, why, results=True)
        return
    for flag, now in ((_SCALE, "--mscale"), (_ALL_DIMS, "--mscale-all-dim")):
        if flag in job and flag not in job.outcomes:
            job.becomes(flag, [Given(now, job.given[flag].values, job.given[flag].written)])
