"""Translation rule for MindSpeed-LLM's supervised fine-tuning, which becomes Megatron-LM's ``--sft``."""

from __future__ import annotations

from mindspeed_dsa.features.data.sft_prompts.feature import MASK_PROMPTS
from mindspeed_dsa.tools.migrate.job import Job, made

_STAGE, _DATA, _TOKENIZER = "--stage", "--is-instruction-dataset", "--tokenizer-type"
_PACK, _NEATLY = "--pack", "--neat-pack"
_RESETS = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
_ORDER = {
    "--no-shuffle": "Megatron reads the conversations in the order of the file.",
    "--padded-samples": "Megatron begins the file again where it ends.",
    "--full-shuffle-instruction-dataset": "Megatron reads them in the order of the file: shuffle it.",
}
_PADDING = ("--no-pad-to-seq-lengths", "--variable-seq-lengths", "--pad-to-multiple-of")
_HANDLER, _SLOW = "--handler-name", "--tokenizer-not-use-fast"
_TEMPLATE = ("--prompt-type", "--prompt-type-path")


def tune(job: Job) -> None:
    """Translate ``--stage sft`` with ``--is-instruction-dataset``; tables of verdicts cover the rest."""
    if job.text(_STAGE) != "sft" or _DATA not in job:
        return
    if why := _unserved(job):
        for flag in (_STAGE, _DATA, _PACK, _NEATLY, *_PADDING):
            if flag in job:
                job.is_dropped(flag, why, results=True)
        return
    why = (
        "One conversation, or several that start with a system's message each, in a line of --data-path; "
        "they do not see each other."
    )
    now = [made("--sft"), made("--sft-tokenizer-prompt-format", "default"), made(MASK_PROMPTS.name)]
    now.append(made("--no-create-attention-mask-in-dataloader"))  # Megatron's SFT data set asserts it
    job.becomes(_STAGE, now, why)
    job.is_dropped(_DATA, "--sft says it.")
    tokenizer = made(_TOKENIZER, "SFTTokenizer")
    job.overrides(_TOKENIZER if _TOKENIZER in job else _STAGE, tokenizer, "It knows chats.")
    if "--data-path" in job:
        why = (
            'Name .jsonl files of conversations, {"messages": [{"role": ..., "content": ...}, ...]} a line: '
            "the .bin and .idx files that MindSpeed-LLM has prepared are not read."
        )
        job.is_kept("--data-path", "unchanged", why)
    said = dict.fromkeys(_TEMPLATE, "The tokenizer's own chat template decides; compare the two.")
    said |= dict.fromkeys(_PADDING, "Padding counts in no loss, and is not seen.") | _ORDER
    said[_HANDLER] = "Files of conversations need no handler."
    said[_SLOW] = "Megatron's SFTTokenizer always takes the fast tokenizer; compare the two on your text."
    if _NEATLY in job:
        said |= dict.fromkeys(
            _RESETS, "Conversations of a line do not see each other, and positions restart."
        )
        said |= dict.fromkeys((_PACK, _NEATLY), "The conversations of a line are packed.")
    for flag, reason in said.items():
        if flag in job:
            job.is_dropped(flag, reason)


def _unserved(job: Job) -> str:
    """Return the reason why this fine-tuning cannot be translated, or an empty string."""
    if job.before("0.13"):
        return "Megatron-core before 0.13 has no --sft; train with 0.17 or later."
    if job.before("0.17"):
        return (
            "--sft of Megatron-core 0.13 to 0.16 knows the prompts of two Nemotron models, and no template "
            "of another tokenizer; train with 0.17 or later."
        )
    if job.before("0.19") and job.number("--micro-batch-size", 1) != 1:
        return "--sft of Megatron-core before 0.19 takes a --micro-batch-size of 1; use it, or 0.19 or later."
    if _NEATLY not in job:
        if _PACK in job:
            return "With --pack and without --neat-pack conversations see each other; those of --sft do not."
        if "--reset-attention-mask" in job:
            return "Turns of a conversation that end with the end-of-text token do not see each other there."
    return ""
