"""Loss targets of conversations are the assistant's tokens, whatever the chat template adds around them."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_dsa.features.data.sft_prompts.answers import mask_prompts
from mindspeed_dsa.features.data.sft_prompts.feature import check_prompts

transformers = pytest.importorskip("transformers")

WORDS = "<s> </s> [U] [A] [S] be kind hi hello how are you fine [THINK] so".split()
PLAIN = (
    "<s>{% for m in messages %} "
    "{{ '[U]' if m.role == 'user' else '[A]' if m.role == 'assistant' else '[S]' }} "
    "{{ m.content }}{% if m.role == 'assistant' %} </s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} [A]{% endif %}"
)
# A template that drops the thinking of all answers but the last.
FORGETFUL = PLAIN.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.replace('[THINK]', '') }}"
)
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello how are you"},
    {"role": "user", "content": "fine"},
    {"role": "assistant", "content": "[THINK] so kind"},
]
ANSWERS = "hello how are you </s> [THINK] so kind </s>".split()


def tokenizer(template):
    """Return a transformers tokenizer with one token per word."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="so")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def unmasked(self, conversation, return_target, add_generation_prompt):
    """Tokenize as Megatron does for this format: targets are a copy of the tokens."""
    ids = self._tokenizer.apply_chat_template(
        list(conversation), tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    tokens = np.array(ids)
    return (tokens, tokens.copy()) if return_target else tokens


def megatrons(template, prompt_format="default", words=None):
    words = words or tokenizer(template)
    return SimpleNamespace(
        _tokenizer=words,
        _prompt_format=prompt_format,
        _prompt_config=SimpleNamespace(custom_chat_template=template, pad_token_id=words.pad_token_id),
    )


def test_only_answers_count():
    self = megatrons(PLAIN)
    tokens, target = mask_prompts(unmasked)(self, CHAT, True, False)
    assert list(tokens) == list(unmasked(self, CHAT, False, False)), "the model reads every token"
    # -100 is a label without loss.
    counted = [WORDS[token] for token in target if token != -100]
    assert counted == ANSWERS
    assert all(label in (-100, token) for token, label in zip(tokens, target, strict=True))


def test_other_formats_and_prompts_alone_are_passed_through():
    for prompt_format, wants in (("nemotron-nano-v2", True), ("default", False)):
        self = megatrons(PLAIN, prompt_format)
        for ours, theirs in zip(
            np.atleast_2d(mask_prompts(unmasked)(self, CHAT, wants, False)),
            np.atleast_2d(unmasked(self, CHAT, wants, False)),
            strict=True,
        ):
            assert list(ours) == list(theirs)


def test_earlier_answers_count_as_the_template_writes_them():
    earlier = [*CHAT, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "[THINK] fine"}]
    _, target = mask_prompts(unmasked)(megatrons(FORGETFUL), earlier, True, False)
    counted = [WORDS[token] for token in target if token != -100]
    assert counted == "hello how are you </s> so kind </s> [THINK] fine </s>".split()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"sft": True, "sft_tokenizer_prompt_format": "default"}, None),
        ({"sft": False, "sft_tokenizer_prompt_format": "default"}, "add --sft"),
        ({"sft": True, "sft_tokenizer_prompt_format": "nemotron-h-aligned"}, "masks prompts itself"),
    ],
)
def test_arguments(args, said):
    problems = list(check_prompts(Namespace(**args), None))
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]
