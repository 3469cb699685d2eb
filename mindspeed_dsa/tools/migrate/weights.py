"""Translation rule for Hugging Face weights that MindSpeed-LLM converts before and after training.

With ``--enable-hf2mg-convert``, ``--load`` is a Hugging Face folder. At every start MindSpeed-LLM converts it
to a checkpoint in ``--mg-save-dir`` (default: a subfolder of ``--load``), and loads this checkpoint. It never
loads the checkpoints that training wrote to ``--save``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import ARCHITECTURES
from mindspeed_dsa.tools.migrate.job import Given, Job, made

LOAD, SAVE, INTERVAL = "--load-hf", "--save-hf", "--save-hf-interval"
"""This library's flags."""
_IMPORT, _EXPORT = "--enable-hf2mg-convert", "--enable-mg2hf-convert"
_KIND, _LAST = "--model-type-hf", "--only-convert-last-checkpoint"
MODELS = {each.mindspeed_llm: each.types[0] for each in ARCHITECTURES if each.mindspeed_llm}
"""Dict from MindSpeed-LLM's name of a supported model to ``model_type`` in its ``config.json``."""
_READ_BY_CONVERSION = ("--mg-save-dir", "--hf-cfg-dir", "--save-layer-by-layer", _KIND)


def convert(job: Job) -> None:
    """Translate the flags for converting weights at the start and end of a job."""
    if "--load-checkpoint-loosely" in job and "--load" not in job:
        job.is_dropped("--load-checkpoint-loosely", "There is no --load.")
    loads_hugging_face = (
        _IMPORT not in job and _EXPORT not in job and "--load" in job and _is_hugging_face(job)
    )
    if _IMPORT in job and "--load" not in job:
        job.is_dropped(_IMPORT, "There is no --load: weights are drawn, not converted.")
    elif _IMPORT in job:
        _import(job, _IMPORT)
    elif loads_hugging_face:
        _import(job, "--load")
    if _EXPORT in job:
        _export(job)
    # Options of a conversion are only dropped if the conversion itself is translated.
    converts = any(job.outcomes[flag].now for flag in (_IMPORT, _EXPORT, "--load") if flag in job.outcomes)
    for flag in _READ_BY_CONVERSION:
        if flag in job and converts:
            job.is_dropped(flag, f"{LOAD} and {SAVE} read the folder's own config.json, and keep no copy.")


def _is_hugging_face(job: Job) -> bool:
    """Return whether ``--load`` is a Hugging Face folder, which MindSpeed-LLM converts without a flag."""
    folder = Path(job.text("--load"))
    try:
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    except OSError:  # not readable, e.g. a path of another machine
        return False
    weights = (
        name.endswith(".safetensors") or (name.startswith("pytorch_model") and name.endswith(".bin"))
        for name in names
    )
    return "config.json" in names and any(weights)


def _unserved(job: Job) -> str:
    """Return the reason why this library cannot convert the model's weights; empty if none is known."""
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
    """Replace ``--load`` by ``--load-hf`` with the same folder."""
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
    """Replace MindSpeed-LLM's export at every checkpoint by ``--save-hf``."""
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
    """Return the flags for an export to Hugging Face files; none without ``--save``."""
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
    """Replace ``--ckpt-format torch``, which ``--save-hf`` does not support."""
    flag = "--ckpt-format"
    if "--save" in job and job.text(flag) == "torch":
        job.overrides(flag, made(flag, "torch_dist"), f"{SAVE} reads checkpoints of this format alone.")


def _below(words: Sequence[str]) -> tuple[str, ...]:
    """Append ``/hf`` to a folder, which may be in shell notation."""
    return tuple(type(word)(f"{word}/hf") for word in words)
