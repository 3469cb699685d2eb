"""Masked prompts with Megatron's own tokenizer of conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.features.data.sft_prompts.test_sft_prompts import ANSWERS, CHAT, PLAIN, WORDS, tokenizer

# Before 0.18 that tokenizer does not take what transformers 5 returns.
pytestmark = pytest.mark.releases(">=0.18,<0.21")


def test_only_answers_count(tmp_path: Path) -> None:
    import mindspeed_dsa

    tokenizer(PLAIN).save_pretrained(tmp_path)
    counted: dict[bool, list[Any]] = {}
    for on in (False, True):
        with mindspeed_dsa.enabled(sft_mask_prompts=on):
            from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer

            _, target = SFTTokenizer(str(tmp_path), "default").tokenize_conversation(CHAT, True, False)
            counted[on] = [WORDS[token] for token in target if token != -100]
    assert counted[True] == ANSWERS
    assert len(counted[False]) > len(ANSWERS), "Megatron counts prompts"
