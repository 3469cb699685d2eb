"""Advice on MindSpeed-LLM's scripts that do not train with Megatron.

They are not translated, because their programs have other flags and are replaced by other programs here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PROGRAM = re.compile(r"^[^#\n]*?(?:(?<![\w.$-])(?:[\w.${}-]*/)*|-m )(\w+\.py|lm_eval)\b", re.MULTILINE)
"""First Python script in a line that is not a comment, or the evaluation module ``lm_eval``."""
_TRAINS = re.compile(r"(pre|post)train_\w+\.py")
_WEIGHTS = (
    "converts weights: a job reads Hugging Face's files by --load-hf and writes them by --save-hf, and "
    "`python -m mindspeed_dsa weights import` and `weights export` do it without a job, for DeepSeek-V3, "
    "DeepSeek-V3.2 and GLM-5.x (docs/weights.md)"
)
_DATA = (
    "prepares data: tools/preprocess_data.py of Megatron-LM takes its place for pretraining (JSON lines in, "
    "--append-eod), files of MindSpeed-LLM's pretraining are read as they are, and fine-tuning reads "
    "conversations in .jsonl files, of which nothing is prepared (docs/migrate.md)"
)
_ENGINE = (
    "runs a model: engines such as vLLM, SGLang and transformers do, from the files that --save-hf or "
    "`python -m mindspeed_dsa weights export` writes (docs/weights.md)"
)
_FSDP2 = (
    "trains by FSDP2, from a YAML file: models of transformers (docs/hosts/transformers.md) "
    "and TorchTitan (docs/hosts/torchtitan.md) train so with this library's operators"
)
_KINDS = {
    r"convert_ckpt\w*|\w*ckpt_dequant": _WEIGHTS,
    r"preprocess_(data|prompt)": _DATA,
    r"(inference|evaluation)\w*|lm_eval": _ENGINE,
    r"train_fsdp2": _FSDP2,
}
"""Dict from pattern of a program's name to a sentence about its purpose and its substitute."""


def of_shell(text: str) -> str:
    """Return advice on the program that replaces a shell script; empty if the script trains with Megatron.

    Args:
        text: script's text.
    """
    names = [match[1] for match in _PROGRAM.finditer(text)]
    # A script that starts a training in addition to other programs counts as a training.
    if any(_TRAINS.fullmatch(name) for name in names):
        return ""
    for name in reversed(names):  # the last program counts, as for trainings
        for pattern, sentence in _KINDS.items():
            if re.fullmatch(pattern, name.removesuffix(".py")):
                return f"{name} {sentence}"
    return ""


def of_yaml(data: Any) -> str:
    """Return advice for a YAML file of MindSpeed-LLM's FSDP2 training; empty for other YAML files.

    Args:
        data: parsed contents of the file.
    """
    if not isinstance(data, Mapping):
        return ""
    sections = [data, *(value for value in data.values() if isinstance(value, Mapping))]
    keys = {str(key) for section in sections for key in section}
    return f"This file {_FSDP2}" if keys & {"fsdp_size", "fsdp_modules", "ep_fsdp_size"} else ""
