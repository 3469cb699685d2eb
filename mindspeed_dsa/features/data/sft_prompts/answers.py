"""Loss targets of conversations: the tokens of assistant answers, found in the chat template's output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from jinja2 import TemplateError

from mindspeed_dsa.features.data.sft_prompts.feature import FORMAT
from mindspeed_dsa.patches.errors import SettingsError

_IGNORED = -100
"""Target of a token without loss, in Megatron's data set and in torch."""
_MARKS = re.compile(r"{%-?\s*generation\s*-?%}")
_REMEDY = (
    "Mark answers with {% generation %} in the template, split the conversation so that it ends with the "
    "answer to be learned, or omit --sft-mask-prompts, which counts prompts too"
)
Render = Callable[..., Any]
Message = Mapping[str, Any]


def prepare(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``SFTTokenizer.__init__``: refuse unusable tokenizers, and pad with bos instead of eos."""

    def __init__(self: Any, tokenizer_path: str, prompt_format: str) -> None:
        original(self, tokenizer_path, prompt_format)
        if prompt_format != FORMAT:
            return
        tokenizer, config = self._tokenizer, self._prompt_config
        if not config.custom_chat_template:
            lack = "has no chat template; add the model's chat_template.jinja to its folder"
        elif not tokenizer.is_fast:
            lack = "does not tell where its tokens are in a text; convert it to a tokenizer.json"
        else:
            # Megatron's data set excludes every token that equals the padding. DeepSeek's tokenizers pad with
            # the token that ends answers; the token that begins a conversation is in no answer.
            if config.pad_token_id == tokenizer.eos_token_id and tokenizer.bos_token_id is not None:
                config.pad_token_id = tokenizer.bos_token_id
            return
        raise SettingsError(f"mindspeed_dsa: sft-prompts: the tokenizer of {tokenizer_path} {lack}")

    return __init__


def mask_prompts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``SFTTokenizer.tokenize_conversation``: exclude prompt tokens from the returned targets."""

    def tokenize_conversation(
        self: Any, conversation: Sequence[Message], return_target: bool, add_generation_prompt: bool
    ) -> Any:
        result = original(self, conversation, return_target, add_generation_prompt)
        if not return_target or self._prompt_format != FORMAT:
            return result
        tokenizer, config = self._tokenizer, self._prompt_config

        def render(messages: Sequence[Message], prompt: bool = False, **options: Any) -> Any:
            options = {"tokenize": False, "chat_template": config.custom_chat_template, **options}
            try:
                return tokenizer.apply_chat_template(list(messages), add_generation_prompt=prompt, **options)
            except TemplateError as error:
                raise SettingsError(
                    f"mindspeed_dsa: sft-prompts: the chat template refuses other contents ({error}), so "
                    f"answers cannot be told from prompts. {_REMEDY}"
                ) from error

        tokens, _ = result
        if _MARKS.search(config.custom_chat_template):
            marked = render(conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            counted = np.array(marked["assistant_masks"]) == 1
            added = tokenizer.added_tokens_decoder
            # Tool calls and </think> end in added tokens that are not special: a stop still follows them.
            special = {token for token in added if added[token].special}
            for last in np.flatnonzero(counted[:-1] & ~counted[1:]):
                written = (token for token in tokens[last::-1] if tokenizer.decode([token]).strip())
                # The token that ends an answer counts, even if the marks end in front of it.
                counted[last + 1] = tokens[last + 1] in special and next(written, None) not in special
        else:
            tokens, counted = _counted(conversation, tokens, tokenizer, render)
        if config.pad_token_id in tokens[counted]:
            raise SettingsError(
                f"mindspeed_dsa: sft-prompts: answers contain {tokenizer.decode(config.pad_token_id)!r}, the "
                "tokenizer's padding, which Megatron excludes from the loss; give the tokenizer another "
                "pad_token in its tokenizer_config.json"
            )
        return tokens, np.where(counted, tokens, _IGNORED)

    return tokenize_conversation


def _counted(messages: Sequence[Message], tokens: Any, tokenizer: Any, render: Render) -> tuple[Any, Any]:
    """Return the conversation's tokens, and a bool array that is true for tokens that count in the loss.

    If the template writes no end after the last answer, a token that ends it is appended.
    """

    def places(text: str) -> Any:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return np.array(encoded["offset_mapping"], dtype=int).reshape(-1, 2)

    whole = render(messages)
    starts, ends = places(whole).T
    if len(starts) != len(tokens):
        raise _refusal("gives other tokens than Megatron has", whole, tokenizer.decode(tokens))
    counted = np.zeros(len(tokens), dtype=bool)
    for start, end, limit in answers(messages, whole, render, places):
        first, behind, following = (ends <= start).sum(), (starts < end).sum(), (starts < limit).sum()
        # A model learns to stop from the first token behind an answer: <|im_end|>, or <|user|> where a
        # template writes no other end.
        stops = (n for n in range(behind, following) if whole[starts[n] : ends[n]].strip())
        stop = next(stops, None)
        if stop is None and limit == len(whole):
            tokens = np.append(tokens, _stop(messages, tokenizer, render))
            counted = np.append(counted, [False] * (len(tokens) - len(counted)))
            stop = len(tokens) - 1
        counted[first : behind if stop is None else stop + 1] = True
    return tokens, counted


def answers(
    messages: Sequence[Message], whole: str, render: Render, places: Callable[[str], Any]
) -> Iterator[tuple[int, int, int]]:
    """Find the assistant answers of a conversation in the text that the chat template renders.

    An answer is between the contents of the previous and the next message. The template's text in front of
    the answer is found by rendering the prompt only, and the text behind it by rendering another answer.

    Args:
        messages: conversation.
        whole: rendering of the conversation.
        render: function from messages to text; if its second argument is true, the text ends with the prompt
            for an answer.
        places: function from a text to the start and end of each token, shape [tokens, 2].

    Yields:
        Start and end of an answer, and start of the next message's content, as positions in ``whole``.

    Raises:
        SettingsError: contents change other parts of the rendering, so answers cannot be told from prompts.
    """
    probes = _probes(messages, whole)
    blank = _blank(messages, probes)
    blanks = render(blank)

    @cache
    def content(turn: int) -> tuple[int, int]:
        probed = render([*messages[:turn], blank[turn], *messages[turn + 1 :]])
        before, behind = _cut(probed, probes[turn], whole)
        start, end = len(before), len(whole) - len(behind)
        if start > end or not (whole.startswith(before) and whole.endswith(behind)):
            raise _refusal(f"changes more than message {turn + 1} with its content", whole, probed)
        return start, end

    for turn, message in enumerate(messages):
        if message["role"].lower() != "assistant":
            continue
        front, back = _cut(blanks, probes[turn], whole)
        first, limit = 0, len(whole)
        if turn:
            _, first = content(turn - 1)
            _, front = _cut(render(blank[:turn], True), probes[turn - 1], whole)
        if turn + 1 < len(messages):
            limit, _ = content(turn + 1)
            back, _ = _cut(back, probes[turn + 1], whole)
        between = whole[first:limit]
        start = _shared(between, front)
        # <think> and </think> share no token, although both begin with <.
        start = first + min((a for a, b in places(front) if a < start < b), default=start)
        end = limit - _shared(between[::-1], back[::-1])
        if start > end:
            raise _refusal(f"has no place for the answer in message {turn + 1}", whole, blanks)
        yield start, end, limit


def _stop(messages: Sequence[Message], tokenizer: Any, render: Render) -> list[int]:
    """Return a list with the token that ends the last answer: the next turn's first token, or end of text."""
    messages = [*messages, {"role": "tool" if messages[-1].get("tool_calls") else "user"}]
    probes = _probes(messages, "")
    text = render(_blank(messages, probes))
    mark, _ = _cut(_cut(text, probes[-2], text)[1], probes[-1], text)
    stops = [*tokenizer(mark.strip(), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [] if stops[0] is None else stops[:1]


def _shared(one: str, other: str) -> int:
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _probes(messages: Sequence[Message], text: str) -> list[str]:
    fence = next(mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in text)
    return [f"{fence}{turn}{fence}" for turn in range(len(messages))]


def _blank(messages: Sequence[Message], probes: Sequence[str]) -> list[Message]:
    """Return the messages with contents replaced by probes; answers also lose reasoning and tool calls."""
    kept = ({} if message["role"].lower() == "assistant" else message for message in messages)
    return [
        {**rest, "role": message["role"], "content": probe}
        for rest, message, probe in zip(kept, messages, probes, strict=True)
    ]


def _cut(text: str, probe: str, whole: str) -> tuple[str, str]:
    before, probed, behind = text.partition(probe)
    if not probed:
        raise _refusal("drops contents", whole, text)
    return before, behind


def _refusal(fault: str, whole: str, other: str) -> SettingsError:
    place = max(0, _shared(whole, other) - 60)
    texts = " and ".join(repr(text[place : place + 240]) for text in (whole, other))
    return SettingsError(
        f"mindspeed_dsa: sft-prompts: the chat template {fault}, so answers cannot be told from prompts: "
        f"{texts}. {_REMEDY}"
    )
