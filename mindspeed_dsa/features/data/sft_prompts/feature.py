"""``--sft-mask-prompts``: excludes prompts from the loss of Megatron-LM's SFT with chat templates.

tests: tests/features/data/sft_prompts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import megatron_flag
from mindspeed_dsa.patches.spec import Patch

MASK_PROMPTS = Flag(
    "--sft-mask-prompts",
    "With --sft and --sft-tokenizer-prompt-format default: only what the assistant says counts in the loss, "
    "as with Megatron's other formats.",
)
_FORMAT = "default"
_IGNORED = -100
"""Target of a token without loss, in Megatron's data set and in torch."""


def check_prompts(args: Any, options: Any) -> Iterator[str]:
    """Yield problems with missing or contradictory arguments."""
    if not argument(args, "sft"):
        yield f"{MASK_PROMPTS.name} is about conversations; add --sft, or omit it"
    elif argument(args, "sft_tokenizer_prompt_format") != _FORMAT:
        yield (
            f"{MASK_PROMPTS.name}: --sft-tokenizer-prompt-format {args.sft_tokenizer_prompt_format} masks "
            f"prompts itself; omit it, or use {_FORMAT}"
        )


def mask_prompts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``SFTTokenizer.tokenize_conversation``, which returns numpy arrays of tokens and targets."""

    def tokenize_conversation(
        self: Any, conversation: Sequence[Any], return_target: bool, add_generation_prompt: bool
    ) -> Any:
        result = original(self, conversation, return_target, add_generation_prompt)
        if not return_target or self._prompt_format != _FORMAT:
            return result
        tokens, target = result
        template = self._prompt_config.custom_chat_template

        def rendered(turns: int, prompt: bool) -> list[int]:
            return list(
                self._tokenizer.apply_chat_template(
                    list(conversation[:turns]),
                    tokenize=True,
                    add_generation_prompt=prompt,
                    chat_template=template,
                    return_dict=False,
                )
            )

        target[:] = _IGNORED
        for turn, message in enumerate(conversation):
            if message["role"].lower() != "assistant":
                continue
            # The answer's tokens: the conversation with this turn, minus the prompt that asks for it.
            before, behind = rendered(turn, True), rendered(turn + 1, False)
            whole = [int(token) for token in tokens[: len(behind)]]
            if whole != behind or behind[: len(before)] != before:
                raise ValueError(
                    f"mindspeed_dsa: sft-prompts: the chat template writes turn {turn + 1} of a conversation "
                    f"otherwise when others follow, so that its tokens cannot be told: {conversation!r}. "
                    "Split such conversations so that each ends with the answer to be learned, or omit "
                    f"{MASK_PROMPTS.name}, which counts prompts too"
                )
            target[len(before) : len(behind)] = tokens[len(before) : len(behind)]
        return tokens, target

    return tokenize_conversation


FEATURE = Feature(
    name="sft-prompts",
    summary="Prompts count in no loss of --sft with a tokenizer's own chat template.",
    flags=(MASK_PROMPTS, megatron_flag("--sft-tokenizer-prompt-format")),
    check=check_prompts,
    doc="sft-prompts.md",
    requires=Requires(versions={"megatron-core": ">=0.17,<0.21"}),
    patches=(
        Patch(
            "megatron.core.tokenizers.text.libraries.sft_tokenizer:SFTTokenizer.tokenize_conversation",
            "wrap",
            "mindspeed_dsa.features.data.sft_prompts.feature:mask_prompts",
            "Megatron's tokenizer counts prompts in the loss with this format",
            params=("conversation", "return_target", "add_generation_prompt"),
        ),
    ),
)
