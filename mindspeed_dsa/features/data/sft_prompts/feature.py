"""``--sft-mask-prompts``: excludes prompts from the loss of Megatron-LM's SFT with chat templates.

tests: tests/features/data/sft_prompts
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.batches import check_conversations
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import megatron_flag
from mindspeed_dsa.patches.spec import Patch

MASK_PROMPTS = Flag(
    "--sft-mask-prompts",
    "With --sft and --sft-tokenizer-prompt-format default: only what the assistant says counts in the loss, "
    "as with Megatron's other formats.",
)
FORMAT = "default"
"""Megatron's name for a tokenizer's own chat template."""
_TOKENIZER = "megatron.core.tokenizers.text.libraries.sft_tokenizer:SFTTokenizer"
_ANSWERS = "mindspeed_dsa.features.data.sft_prompts.answers"


def check_prompts(args: Any, options: Any) -> Iterator[str]:
    """Yield problems with missing or contradictory arguments."""
    if not argument(args, "sft"):
        yield f"{MASK_PROMPTS.name} is about conversations; add --sft, or omit it"
    elif argument(args, "sft_tokenizer_prompt_format") != FORMAT:
        yield (
            f"{MASK_PROMPTS.name}: --sft-tokenizer-prompt-format {args.sft_tokenizer_prompt_format} masks "
            f"prompts itself; omit it, or use {FORMAT}"
        )
    yield from check_conversations(args, MASK_PROMPTS.name)


FEATURE = Feature(
    name="sft-prompts",
    summary="Prompts count in no loss of --sft with a tokenizer's own chat template.",
    flags=(MASK_PROMPTS, megatron_flag("--sft-tokenizer-prompt-format")),
    check=check_prompts,
    doc="sft-prompts.md",
    requires=Requires(versions={"megatron-core": ">=0.17,<0.21"}),
    patches=(
        Patch(
            f"{_TOKENIZER}.__init__",
            "wrap",
            f"{_ANSWERS}:prepare",
            "some tokenizers have no chat template, or pad with the token that ends answers",
            params=("tokenizer_path", "prompt_format"),
        ),
        Patch(
            f"{_TOKENIZER}.tokenize_conversation",
            "wrap",
            f"{_ANSWERS}:mask_prompts",
            "Megatron's tokenizer counts prompts in the loss with this format",
            params=("conversation", "return_target", "add_generation_prompt"),
        ),
    ),
)
