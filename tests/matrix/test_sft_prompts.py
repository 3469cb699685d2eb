"""Prompt masking with Megatron's own conversation tokenizer, and in its data set's loss mask."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.features.data.sft_prompts import test_chat_templates as forms
from tests.features.data.sft_prompts.test_sft_prompts import ANSWERS, CHAT, PLAIN, WORDS, tokenizer

# Before 0.18 that tokenizer does not accept the return type of transformers 5.
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
    # PLAIN's tokenizer has no padding token, so Megatron pads with </s>, which would count nowhere.
    assert counted[True] == ANSWERS
    assert len(counted[False]) > len(ANSWERS), "Megatron counts prompts"


@pytest.mark.parametrize("form", ["GLM-5", "R1", "Qwen3"])
def test_answers_and_their_ends_are_in_the_loss_mask(form: str, tmp_path: Path) -> None:
    """DeepSeek's published tokenizers pad with the token that ends answers."""
    pytest.importorskip("datasets", reason="--sft reads conversations with it")
    import mindspeed_dsa

    words = forms.tokenizer(forms.FORMS[form], pad_token="</s>" if form == "R1" else "[pad]")
    words.save_pretrained(tmp_path)
    first = [forms.SYSTEM, forms.user("hi"), forms.answer("hello"), forms.user("so"), forms.answer("fine")]
    pack = [*first, forms.SYSTEM, forms.user("hi"), forms.answer("bye")]
    earlier, last, _, end, _ = forms.TEXTS[form]
    with mindspeed_dsa.enabled(sft_mask_prompts=True):
        from megatron.core.tokenizers import MegatronTokenizer
        from megatron.training.datasets.sft_dataset import SFTDataset

        theirs = MegatronTokenizer.from_pretrained(
            tokenizer_path=str(tmp_path), metadata_path={"library": "sft"}, prompt_format="default"
        )
        config = SimpleNamespace(
            tokenizer=theirs,
            sequence_length=320,
            reset_position_ids=False,
            context_parallel_size=1,
            create_attention_mask=False,
            reset_attention_mask=False,
        )
        data = SFTDataset.__new__(SFTDataset)
        data.config, data.dataset, data.indices = config, [pack], [0]
        sample = data[0]
    counted = sample["labels"][sample["loss_mask"] == 1]
    assert words.decode(counted) == "".join((earlier, "hello", end, last, "fine", end, last, "bye", end))
    assert len(sample["tokens"]) == 320
