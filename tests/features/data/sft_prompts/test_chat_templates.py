"""Targets with templates of the forms that DeepSeek, GLM, Qwen, Kimi and Llama publish, written anew."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindspeed_dsa.features.data.sft_prompts.answers import mask_prompts, prepare
from mindspeed_dsa.patches.errors import SettingsError
from tests.features.data.sft_prompts.test_sft_prompts import megatrons, unmasked

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

MARKS = (
    "<s> </s> [pad] <out> </out> <|im_start|> <|im_end|> <|im_assistant|> <|im_user|> <|im_middle|> <|head|> "
    "<|/head|> <|eot|> [gMASK] <|user|> <|assistant|> <|observation|> <|system|> <|User|> <|Assistant|>"
).split()
# Published tokenizers add these too, but not as special tokens.
ADDED = "<think> </think> <call> </call>".split()
CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.name }}</call>{% endfor %}"
LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)


def each(turn: str, prompt: str, before: str = "<s>") -> str:
    """Template that writes every message with ``turn``, and ``prompt`` for an answer."""
    turns = f"{before}{{% for m in messages %}}{turn}{{% endfor %}}"
    return f"{turns}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"


def deepseek(header: str, after_tools: str, prompt: str) -> str:
    """Template in which tools answer without a header, and reasoning is cut off."""
    return each(
        "{% if m.role == 'user' %}<|User|>{{ m.content }}{% set at.tool = false %}"
        "{% elif m.role == 'tool' %}<out>{{ m.content }}</out>{% set at.tool = true %}"
        f"{{% elif m.role == 'assistant' %}}{{% if at.tool %}}{after_tools}{{% else %}}{header}{{% endif %}}"
        f"{{{{ m.content.split('</think>')[-1] }}}}{CALLS}</s>{{% set at.tool = false %}}"
        "{% else %}{{ m.content }}{% endif %}",
        f"{{% if not at.tool %}}{prompt}{{% endif %}}",
        "<s>{% set at = namespace(tool=false) %}",
    )


CHATML = each(
    f"<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{CALLS}<|im_end|>\n", "<|im_start|>assistant\n"
)
FORMS = {
    "ChatML": CHATML,
    "Llama-3": each(
        f"<|head|>{{{{ m.role }}}}<|/head|>\n\n{{{{ m.content | trim }}}}{CALLS}<|eot|>",
        "<|head|>assistant<|/head|>\n\n",
    ),
    "Kimi-K2": each(
        f"<|im_{{{{ 'assistant' if m.role == 'assistant' else 'user' }}}}|>{{{{ m.role }}}}<|im_middle|>"
        f"{{{{ m.content }}}}{CALLS}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "Qwen3": each(
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.last and "
        "(loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        f"{{{{ m.content }}}}{CALLS}<|im_end|>\n",
        "<|im_start|>assistant\n",
        LAST_USER,
    ),
    "DeepSeek-V3.1": deepseek("<|Assistant|></think>", "", "<|Assistant|></think>"),
    "DeepSeek-V3.1 thinks": deepseek("<|Assistant|></think>", "", "<|Assistant|><think>"),
    "R1": deepseek("<|Assistant|>", "", "<|Assistant|><think>\n"),
    "GLM-5": each(
        "{% if m.role == 'assistant' %}<|assistant|>{% if m.reasoning_content and loop.index0 > ns.last %}"
        f"<think>{{{{ m.reasoning_content }}}}{{% endif %}}</think>{{{{ m.content }}}}{CALLS}"
        "{% elif m.role == 'tool' %}<|observation|>{{ m.content }}{% else %}<|{{ m.role }}|>{{ m.content }}"
        "{% endif %}",
        "<|assistant|><think>",
        "[gMASK]" + LAST_USER,
    ),
}
# Of each form: the text that begins an earlier answer, the last one and one after a tool, and the ends of an
# answer before a user and before a tool.
EMPTY = "<think>\n\n</think>\n\n"
TEXTS = {
    "ChatML": ("", "", "", "<|im_end|>", "<|im_end|>"),
    "Llama-3": ("", "", "", "<|eot|>", "<|eot|>"),
    "Kimi-K2": ("", "", "", "<|im_end|>", "<|im_end|>"),
    "Qwen3": ("", EMPTY, "", "<|im_end|>", "<|im_end|>"),
    "DeepSeek-V3.1": ("", "", "", "</s>", "</s>"),
    "DeepSeek-V3.1 thinks": ("</think>", "</think>", "", "</s>", "</s>"),
    "R1": ("", "", "", "</s>", "</s>"),
    "GLM-5": ("</think>", "</think>", "</think>", "<|user|>", "<|observation|>"),
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, reasoning: str | None = None, call: str | None = None) -> dict[str, Any]:
    # As the reader of JSON lines gives them: keys that other messages have are None.
    calls = None if call is None else [{"name": call}]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


SYSTEM = {"role": "system", "content": "be kind"}
TOOL = {"role": "tool", "content": "22 C"}


def tokenizer(template: str, **tokens: str) -> Any:
    """Return a transformers tokenizer with one token per byte and per mark."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(MARKS)
    made.add_tokens(ADDED)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "[pad]", **tokens}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    fast.chat_template = template
    return fast


def counted(template: str, chat: list[dict[str, Any]], self: Any = None) -> list[str]:
    """Return the pieces of text that are loss targets."""
    self = self or megatrons(template, words=tokenizer(template))
    tokens, target = mask_prompts(unmasked)(self, chat, True, False)
    stock = unmasked(self, chat, False, False)
    assert list(tokens[: len(stock)]) == list(stock), "the model reads every token"
    assert len(tokens) == len(target) <= len(stock) + 1
    assert all(label in (-100, token) for token, label in zip(tokens, target, strict=True))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], target != -100, [False]])))
    return [self._tokenizer.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("form", FORMS)
def test_answers_and_their_ends_count(form):
    template = FORMS[form]
    earlier, last, after_tool, end, end_of_call = TEXTS[form]
    # Answers that contain the marks of whole turns.
    whole = tokenizer(template).apply_chat_template([user("hi"), answer("<b>")], tokenize=False).strip()
    kept = whole.split("</think>")[-1] if "</s>" in end else whole
    cases = (
        ([user("hi"), answer("hello")], [last + "hello" + end]),
        ([user("hi"), answer("<b> is 一"), SYSTEM], [earlier + "<b> is 一"]),
        (
            [SYSTEM, user("hi"), answer("hello"), user("<t"), answer("fine")],
            [earlier + "hello" + end, last + "fine" + end],
        ),
        ([user("hi"), answer(""), user(""), answer("")], [earlier + end, last + end]),
        ([user("hi"), answer(whole), user("so"), answer("t")], [earlier + kept + end, last + "t" + end]),
        (
            [user("hi"), answer("", call="f"), TOOL, answer("22"), user("so"), answer("", call="g")],
            [
                earlier + "<call>f</call>" + end_of_call,
                after_tool + "22" + end,
                last + "<call>g</call>" + end_of_call,
            ],
        ),
        ([SYSTEM], []),
        ([user("hi"), answer("hello"), user("so")], [earlier + "hello" + end]),
    )
    for chat, expected in cases:
        answers = counted(template, chat)
        if chat[-1] is SYSTEM and answers:
            # The mark of a system's turn ends the answer, or the template's own end.
            answers = [answers[0][: len(expected[0])]]
        assert answers == expected, chat


def test_reasoning_counts_where_the_template_keeps_it():
    chat = [
        user("hi"),
        answer("", "one", call="f"),
        TOOL,
        answer("22", "two"),
        user("so"),
        answer("fine", "three"),
    ]
    assert counted(FORMS["Qwen3"], chat) == [
        "<call>f</call><|im_end|>",
        "22<|im_end|>",
        "<think>\nthree\n</think>\n\nfine<|im_end|>",
    ]
    # The prompt that GLM-5 gets ends in <think>, so the model never writes it.
    assert counted(FORMS["GLM-5"], chat) == [
        "</think><call>f</call><|observation|>",
        "</think>22<|user|>",
        "three</think>fine<|user|>",
    ]
    chat = [user("hi"), answer("<think>one</think>hello"), user("so"), answer("<think>two</think>fine")]
    assert counted(FORMS["R1"], chat) == ["hello</s>", "fine</s>"]


def test_a_conversation_is_rendered_once_in_each_form(monkeypatch):
    rendered = []
    self = megatrons(FORMS["GLM-5"], words=tokenizer(FORMS["GLM-5"]))
    theirs = self._tokenizer.apply_chat_template

    def record(messages, **options):
        rendered.append(json.dumps([messages, options]))
        return theirs(messages, **options)

    monkeypatch.setattr(self._tokenizer, "apply_chat_template", record)
    chat = [message for turn in range(10) for message in (user(f"{turn}"), answer("hello"))]
    mask_prompts(unmasked)(self, chat, True, False)
    assert len(rendered) == len(set(rendered)) < 3 * len(chat) / 2


def test_the_templates_own_marks_decide():
    marked = "{% generation %}{{ m.content }}END{% endgeneration %}"
    turn = "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}MARKED{% else %}{{ m.content }}<|im_end|>"
    turn += "{% endif %}\n"
    chat = [user("hi"), answer("hello"), user("so"), answer("fine")]
    for end, behind in (("", "<|im_end|>"), ("<|im_end|>", ""), ("<|im_end|>\n", "")):
        template = each(
            turn.replace("MARKED", marked.replace("END", end) + behind), "<|im_start|>assistant\n"
        )
        words = tokenizer(template)
        answers = counted(template, chat)
        assert answers == [f"hello{end or behind}", f"fine{end or behind}"], "the end counts in any case"
        said = words.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        theirs = np.array(said["input_ids"])[np.array(said["assistant_masks"]) == 1]
        assert "".join(answers).replace(behind or "\0", "") == words.decode(theirs)


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_a_marked_answer_that_ends_in_an_added_token_counts_with_its_stop(end):
    said = f"{{{{ m.content }}}}{CALLS}"
    behind = "" if end else "<|im_end|>"
    template = each(
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        f"{{% generation %}}{said}{end}{{% endgeneration %}}{behind}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n",
        "<|im_start|>assistant\n",
    )
    for chat, expected in (
        (
            [user("hi"), answer("", call="f"), TOOL, answer("22")],
            ["<call>f</call><|im_end|>", "22<|im_end|>"],
        ),
        ([user("hi"), answer("<think>so</think>")], ["<think>so</think><|im_end|>"]),
    ):
        assert counted(template, chat) == counted(CHATML, chat) == expected


def test_a_template_without_ends_ends_in_the_next_turns_words_or_the_end_of_text():
    chat = [user("hi"), answer("hello"), user("so"), answer("fine")]
    words = each("{{ m.role | upper }}: {{ m.content }}\n", "ASSISTANT:")
    assert counted(words, chat) == [" hello\nU", " fine\nU"]
    assert counted(each("{{ m.content }}\n", "", ""), chat) == ["hello", "fine\n</s>"]


def test_what_cannot_be_told_apart_is_refused_with_both_texts():
    chat = [user("apple"), answer("hello")]
    for template, said in (
        (
            "{{ messages[0].content }}: " + CHATML,
            r"more than message 1 with its .*'apple: <s>.*' and '\\ue0000",
        ),
        (
            CHATML.replace("{{ m.content }}", "{{ m.content[:1] }}"),
            r"drops contents.*'<s>.*apple|drops contents",
        ),
        ("{% if messages[0].content != 'apple' %}{{ raise_exception('no!') }}{% endif %}" + CHATML, "no!"),
    ):
        with pytest.raises(SettingsError, match=said) as refused:
            counted(template, chat)
        assert "{% generation %}" in str(refused.value)


def make(words: Any) -> Any:
    """Run the decorated ``__init__`` of a tokenizer like Megatron's."""

    def theirs(self, path, prompt_format):
        pad = words.pad_token_id if words.pad_token_id is not None else words.eos_token_id
        self._tokenizer, self._prompt_format = words, prompt_format
        self._prompt_config = SimpleNamespace(custom_chat_template=words.chat_template, pad_token_id=pad)

    self = SimpleNamespace()
    prepare(theirs)(self, "DIR", "default")
    return self


def test_a_tokenizer_without_a_template_or_without_places_is_refused():
    with pytest.raises(SettingsError, match="tokenizer of DIR has no chat template; add"):
        make(tokenizer(None))
    slow = SimpleNamespace(is_fast=False, chat_template=CHATML, pad_token_id=0, eos_token_id=1)
    with pytest.raises(SettingsError, match="convert it to a tokenizer"):
        make(slow)


def test_padding_is_no_end_of_an_answer():
    chat = [user("hi"), answer("hello")]
    template = FORMS["R1"]
    for tokens in ({"pad_token": "</s>"}, {"pad_token": None}):
        self = make(tokenizer(template, **tokens))
        assert self._prompt_config.pad_token_id == self._tokenizer.bos_token_id
        assert counted(template, chat, self) == ["hello</s>"]
    assert make(tokenizer(template))._prompt_config.pad_token_id == MARKS.index("[pad]") + 256
    with pytest.raises(SettingsError, match="contain '</s>', the tokenizer's padding"):
        counted(template, chat, make(tokenizer(template, pad_token="</s>", bos_token=None)))
