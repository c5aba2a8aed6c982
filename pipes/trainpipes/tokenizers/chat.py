"""Conversations as the tokenizer's chat template writes them, and the assistant's tokens."""

from __future__ import annotations

import copy
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import need, require, wrong
from trainpipes.errors import ConfigError, DataError
from trainpipes.tokenizers.engine import digest
from trainpipes.tokenizers.ragged import Ragged
from trainpipes.tokenizers.transformers import auto_tokenizer, is_hub_name

#: What a template marks the assistant's part with, for transformers.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Templates are compiled once for all tokenizers, and what tracks marked parts is part of them.
_lock = threading.Lock()
#: Conversations that are tokenized together: what tells where tokens stand takes some 100 bytes for each.
AT_A_TIME = 64


Tools: TypeAlias = "Sequence[Any] | None"


@dataclass(frozen=True)
class Written:
    text: str
    spans: Sequence[tuple[int, int]]


class Chat:
    def __init__(self, tokenizer: Any, template: str | None) -> None:
        need("transformers", "a chat template", oldest="4.52")
        by_name = isinstance(tokenizer, str) and is_hub_name(tokenizer)
        folder = isinstance(tokenizer, str | os.PathLike) and os.path.isdir(tokenizer)
        good = folder or by_name or hasattr(tokenizer, "apply_chat_template")
        rule = "a tokenizer of transformers, or the name or folder of one"
        require(good, "chat_template(tokenizer)", rule, tokenizer)
        self._tokenizer = tokenizer
        self._given = template
        self._loaded: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None}

    @property
    def loaded(self) -> Any:
        if self._loaded is None or self._loaded[0] != os.getpid():
            found = self._tokenizer
            if isinstance(found, str | os.PathLike):
                found = auto_tokenizer(os.fspath(found))
            else:
                found = copy.deepcopy(found)
            if not getattr(found, "is_fast", False):
                kind = type(found).__name__
                raise wrong("chat_template(tokenizer)", "a fast tokenizer of transformers", kind)
            backend = found.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            # Some put spaces outside of the tokens that hold them; special tokens are the template's.
            backend.post_processor = None
            backend.encode_special_tokens = bool(found.split_special_tokens)
            self._loaded = os.getpid(), found
        return self._loaded[1]

    @property
    def template(self) -> str:
        if self._given is not None:
            return self._given
        try:
            found: str = self.loaded.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer has no chat template of its own ({str(error).splitlines()[0]}): pass "
                "chat_template(..., template=...)"
            ) from error
        return found

    def fingerprint(self) -> str:
        return digest(self.template.encode())

    def write(
        self, messages: Sequence[Any], prompt: Sequence[Any] = (), tools: Tools = None
    ) -> Written:
        conversation = [*prompt, *messages]
        with _lock:
            if not MARKED.search(self.template):
                text = self._text(conversation, tools)
                return Written(text, self._spans(conversation, tools, text, len(prompt)))
            text, spans = self._render(conversation, tools, return_assistant_tokens_mask=True)
            if prompt:
                before = self._text(prompt, tools, prompt=True)
                if not text.startswith(before):
                    raise DataError(
                        "the chat template writes the prompt differently when no response follows, "
                        "or the response does not start with an assistant message, so that it "
                        "is not known where the response starts"
                    )
                spans = [span for span in spans if span[0] >= len(before)]
        return Written(text, spans)

    def encode(self, written: Sequence[Written]) -> tuple[Ragged, npt.NDArray[np.bool_]]:
        ids: list[Ragged] = []
        masks: list[npt.NDArray[np.bool_]] = []
        engine = self.loaded.backend_tokenizer
        for start in range(0, len(written), AT_A_TIME):
            some = written[start : start + AT_A_TIME]
            encodings = engine.encode_batch([one.text for one in some], add_special_tokens=False)
            ids.append(Ragged.of_encodings(encodings))
            for encoding, one in zip(encodings, some, strict=True):
                mask = np.zeros(len(encoding), dtype=np.bool_)
                for first, end in one.spans:
                    mask[_tokens(encoding, first, end)] = True
                masks.append(mask)
        if not written:
            return Ragged.of_lists([]), np.zeros(0, np.bool_)
        lengths = np.concatenate([part.lengths for part in ids])
        values = np.concatenate([part.values for part in ids])
        return Ragged.of_lengths(values, lengths), np.concatenate(masks)

    def _text(self, messages: Sequence[Any], tools: Tools, prompt: bool = False) -> str:
        with _refusals():
            found: str = self.loaded.apply_chat_template(
                messages, tools, chat_template=self.template, tokenize=False,
                add_generation_prompt=prompt,
            )  # fmt: skip
        return found

    def _render(
        self, messages: Sequence[Any], tools: Tools, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        with _refusals():
            (text,), spans = render(
                [messages], tools, chat_template=self.template, **options,
                **self.loaded.special_tokens_map,
            )  # fmt: skip
        return text, [span for spans_of_one in spans for span in spans_of_one]

    def _spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools, text: str, first: int
    ) -> list[tuple[int, int]]:
        """Where the assistant speaks in the text: after its prompt, up to its turn's end mark."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            last = number + 1 == len(messages)
            before = self._before(messages[:number], tools)
            upto = text if last else self._text(messages[: number + 1], tools)
            if before is None or not (upto.startswith(before) and text.startswith(upto)):
                raise DataError(
                    f"the chat template writes message {number} differently when it is the last "
                    "one, or starts it differently from its generation prompt, so that it is not known "
                    "which tokens are the assistant's: mark them in the template by {% generation %} … "
                    "{% endgeneration %}, and pass it as template=..."
                )
            content = message.get("content")
            said = upto[len(before) :]
            kept = len(said.rstrip())
            if isinstance(content, str) and content in said:  # its own line ends stay
                kept = max(kept, said.find(content) + len(content))
            spans.append((len(before), len(before) + kept))
        return spans

    def _before(self, messages: Sequence[Any], tools: Tools) -> str | None:
        """The assistant's prompt; None if the template has none for these messages."""
        if messages:
            return self._text(messages, tools, prompt=True)
        try:  # transformers' own method takes no conversation of no message
            return self._render(messages, tools, add_generation_prompt=True)[0]
        except DataError:
            return None


def _tokens(encoding: Any, start: int, stop: int) -> slice:
    """The tokens that hold any of a part of the text."""
    # Some tokenizers leave characters out: of these there is no token.
    found = (encoding.char_to_token(place) for place in range(start, stop))
    first = next((token for token in found if token is not None), None)
    if first is None:
        return slice(0)
    found = (encoding.char_to_token(place) for place in range(stop - 1, start - 1, -1))
    end = next(token for token in found if token is not None) + 1
    while end < len(encoding):  # a character may have several tokens
        chars = encoding.token_to_chars(end)
        if chars is None or chars[0] >= stop:
            break
        end += 1
    return slice(first, end)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError(
            f"the chat template cannot write this conversation: {type(error).__name__}: {error}"
        ) from error


def messages_of(value: Any, parse_arguments: bool = True) -> list[dict[str, Any]]:
    """A conversation as transformers takes it, without nulls, which Arrow puts in for missing keys."""
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f"a conversation is a list of messages, one or more, got {type(value).__name__}"
            f"{' of none' if value is not None and not value else ''}"
        )
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f'message {number} of a conversation is a dict with "role" and "content", got {message!r:.80}'
            )
    found: list[dict[str, Any]] = _filled(value)
    if parse_arguments:
        for message in found:
            if "tool_calls" in message:
                _parse(message["tool_calls"])
    return found


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    try:
        found = json.loads(value or "[]") if isinstance(value, str) else value or []
        if isinstance(found, list):
            found = [json.loads(tool) if isinstance(tool, str) else tool for tool in found]
        filled = _filled(found)
    except (ValueError, RecursionError) as error:
        raise DataError(f"tools are JSON, which this is not ({error}): {value!r:.80}") from None
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise DataError(f"tools are a list of JSON schemas, got {value!r:.80}")
    return filled or None


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _filled(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_filled(v) for v in value]
    return value


def _parse(calls: Any) -> None:
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            continue
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):  # what a model wrote, and may be wrong
            continue
        if isinstance(arguments, dict):
            function["arguments"] = arguments
