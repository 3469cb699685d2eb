"""Hugging Face's weights: a folder that MindSpeed-LLM converts before training starts, and one after it.

``--enable-hf2mg-convert`` makes ``--load`` name that folder. MindSpeed-LLM writes a checkpoint of it at every
start, into ``--mg-save-dir`` or below the folder, and loads that one: what ``--save`` has written is never
read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_dsa.tools.migrate.job import Given, Job, made

LOAD, SAVE, INTERVAL = "--load-hf", "--save-hf", "--save-hf-interval"
"""This library's flags."""
_IMPORT, _EXPORT = "--enable-hf2mg-convert", "--enable-mg2hf-convert"
_KIND, _LAST = "--model-type-hf", "--only-convert-last-checkpoint"
MODELS = {"deepseek3": "deepseek_v3", "deepseek32": "deepseek_v32", "glm5": "glm_moe_dsa"}
"""MindSpeed-LLM's names of the models whose weights are converted here, and the names in ``config.json``."""
_READ_BY_CONVERSION = ("--mg-save-dir", "--hf-cfg-dir", "--save-layer-by-layer", _KIND)


def convert(job: Job) -> None:
    """Translate the conversion of weights at the start and at the end of a job."""
    if "--load-checkpoint-loosely" in job and "--load" not in job:
        job.is_dropped("--load-checkpoint-loosely", "There is no --load.")
    found = _IMPORT not in job and _EXPORT not in job and "--load" in job and _is_hugging_face(job)
    if _IMPORT in job and "--load" not in job:
        job.is_dropped(_IMPORT, "There is no --load: weights are drawn, not converted.")
    elif _IMPORT in job:
        _import(job, _IMPORT)
    elif found:
        _import(job, "--load")
    if _EXPORT in job:
        _export(job)
    converts = any(job.outcomes[flag].now for flag in (_IMPORT, _EXPORT, "--load") if flag in job.outcomes)
    for flag in _READ_BY_CONVERSION:
        if flag in job and converts:
            job.is_dropped(flag, f"{LOAD} and {SAVE} read the folder's own config.json, and keep no copy.")


def _is_hugging_face(job: Job) -> bool:
    """Return whether ``--load`` names a folder here with weights that MindSpeed-LLM converts unasked."""
    folder = Path(job.text("--load"))
    try:
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    except OSError:  # not this machine's, or not for us
        return False
    weights = (
        name.endswith(".safetensors") or (name.startswith("pytorch_model") and name.endswith(".bin"))
        for name in names
    )
    return "config.json" in names and any(weights)


def _unserved(job: Job) -> str:
    """Say why weights of the job's model are not converted here; empty where they are, or may be."""
    kind = job.text(_KIND)
    if not kind or kind in MODELS or job.unknown(_KIND):
        return ""  # the folder's own config.json is checked when the job starts
    known = ", ".join(f"{name} ({family})" for name, family in MODELS.items())
    return (
        f"Weights of {kind} are not converted here, those of {known} are. Convert the folder of --load to a "
        "Megatron checkpoint before, and omit this flag: Megatron's own tools/checkpoint has loaders of "
        "other models, and NVIDIA's Megatron-Bridge more, which needs Transformer Engine."
    )


def _import(job: Job, flag: str) -> None:
    """Let ``--load-hf`` name the folder that ``--load`` does."""
    if why := _unserved(job):
        job.is_dropped(flag, why, results=True)
        return
    folder = job.given["--load"]
    why = (
        "--load names a folder of Hugging Face's there. Every start begins with its weights: add --load with "
        "the folder of --save, and a restart goes on with what is saved."
    )
    if "--finetune" not in job:
        why += (
            " MindSpeed-LLM counts the conversion as iteration 1: it skips the first batch, and takes one "
            "step fewer."
        )
    now = [Given(LOAD, folder.values, folder.written)]
    if flag == "--load":
        why = f"MindSpeed-LLM converts the folder unasked, and what is saved as well. {why}"
        now += _exported(job)
        _saved_as_torch_dist(job)
    job.becomes(flag, now, why)
    if flag != "--load":
        job.omits("--load", f"{LOAD} has the folder.")


def _export(job: Job) -> None:
    """Let ``--save-hf`` write a folder of Hugging Face's where MindSpeed-LLM writes one per checkpoint."""
    if why := _unserved(job):
        job.is_dropped(_EXPORT, why, results=False)
        return
    if "--save" not in job:
        job.is_dropped(_EXPORT, "There is no --save, without which nothing is exported.", results=False)
        return
    now = _exported(job)
    _saved_as_torch_dist(job)
    often = "As often as a checkpoint is saved, and at" if len(now) > 1 else "At"
    job.becomes(_EXPORT, now, f"{often} the end of the job.")
    for flag in ("--hf-save-dir", _LAST):
        if flag in job:
            job.is_dropped(flag, f"{SAVE} says it.")


def _exported(job: Job) -> list[Given]:
    """Return the flags of an export; none without ``--save``."""
    if "--save" not in job:
        return []
    named = job.given.get("--hf-save-dir")
    folder = named or job.given["--save"]
    values, written = (
        (folder.values, folder.written) if named else map(_below, (folder.values, folder.written))
    )
    now = [Given(SAVE, values, written)]
    if _LAST not in job and "--save-interval" in job:
        interval = job.given["--save-interval"]
        now.append(Given(INTERVAL, interval.values, interval.written))
    return now


def _saved_as_torch_dist(job: Job) -> None:
    """Replace ``--ckpt-format torch`` of a job that saves, of whose checkpoints no model is written."""
    flag = "--ckpt-format"
    if "--save" in job and job.text(flag) == "torch":
        job.overrides(flag, made(flag, "torch_dist"), f"{SAVE} reads checkpoints of this format alone.")


def _below(words: Sequence[str]) -> tuple[str, ...]:
    """Return the folder ``hf`` below another one, as a shell reads it where a shell has written that."""
    return tuple(type(word)(f"{word}/hf") for word in words)
