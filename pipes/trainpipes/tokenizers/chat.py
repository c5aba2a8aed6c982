"""Conversations as the tokenizer's chat template writes them, and the assistant's tokens."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import need, require, wrong
from trainpipes._internal.locks import ForkLock
from trainpipes._internal.messages import warn_once
from trainpipes.errors import ConfigError, DataError, cut
from trainpipes.tokenizers.adapters import auto_tokenizer, is_hub_name
from trainpipes.tokenizers.engine import Loaded, Ragged, digest

#: What a template marks the assistant's part with, for transformers.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
LAST_NEWLINE = re.compile(r"(\r\n|\r|\n)\Z")
#: A compiled template tracks the marked parts of a single conversation at a time.
_lock = ForkLock()
#: Conversations that are tokenized together: places of tokens take some 100 bytes for each.
AT_A_TIME = 64

Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
Tools: TypeAlias = "Sequence[Any] | None"
Spans: TypeAlias = "list[tuple[int, int]]"


@dataclass(frozen=True)
class Written:
    """A conversation's text, and where the assistant speaks in it."""

    text: str
    spans: Spans


class Chat(Loaded):
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        super().__init__()
        need("transformers", "a chat template")
        by_name = isinstance(tokenizer, str) and is_hub_name(tokenizer)
        folder = isinstance(tokenizer, str | os.PathLike) and os.path.isdir(tokenizer)
        good = folder or by_name or hasattr(tokenizer, "apply_chat_template")
        rule = "a tokenizer of transformers, or the name or folder of one"
        require(good, "chat_template(tokenizer)", rule, tokenizer)
        named = isinstance(tokenizer, str | os.PathLike)
        # The program goes on with the object, and may change it.
        self._tokenizer = os.fspath(tokenizer) if named else copy.deepcopy(tokenizer)
        rule, way = "a Jinja template", "of a file, pathlib.Path(...).read_text()"
        is_template = isinstance(template, str) and ("{{" in template or "{%" in template)
        require(template is None or is_template, "chat_template(template)", rule, template, way)
        self._given = template

    def _load(self) -> Any:
        source = self._tokenizer
        tokenizer = auto_tokenizer(source) if isinstance(source, str) else copy.deepcopy(source)
        if not getattr(tokenizer, "is_fast", False):
            kind = type(tokenizer).__name__
            raise wrong("chat_template(tokenizer)", "a fast tokenizer of transformers", kind)
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        # Some put spaces outside of the tokens that hold them; special tokens are the template's.
        backend.post_processor = None
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        return tokenizer

    def template(self, tools: Tools = None) -> str:
        """The template; of a tokenizer's named ones that for tools, where there are some."""
        if self._given is not None:
            return self._given
        try:
            template: str = self.loaded.get_chat_template(tools=tools)
        except ValueError as error:
            why = f"the tokenizer has no chat template of its own ({str(error).splitlines()[0]})"
            raise ConfigError(f"{why}: pass chat_template(..., template=...)") from error
        return template

    def fingerprint(self, tools: bool = False) -> str:
        template = self.template()
        of_tools = self.template([{}]) if tools else template
        if "strftime_now" in template + of_tools:
            why = "the chat template writes today's date (strftime_now)"
            way = "pass template=... with a date in its place"
            warn_once(f"{why}: a run that goes on another day has other tokens: {way}")
        return digest((template if template == of_tools else template + of_tools).encode())

    def write(self, messages: Messages, prompt: Messages = (), tools: Tools = None) -> Written:
        conversation = [*prompt, *messages]
        with _lock:
            if not MARKED.search(self.template(tools)):
                text = self._render(conversation, tools)[0]
                return Written(text, self._spans(conversation, tools, text, len(prompt)))
            text, spans = self._render(conversation, tools, return_assistant_tokens_mask=True)
            spans = _in_loss(spans, conversation)
            if not prompt:
                return Written(text, spans)
            before = self._render(prompt, tools, add_generation_prompt=True)[0]
        if not text.startswith(before):
            why = "the template writes the prompt differently when no response follows"
            way = "in that case mark the assistant's tokens by {% generation %} in template=..."
            raise DataError(
                "the start of the response is not found: it does not start with an assistant message, or "
                f"{why}: {way}"
            )
        start = len(before)
        return Written(text, [(max(a, start), b) for a, b in spans if b > start])

    def prompt(self, messages: Messages, tools: Tools = None) -> str:
        """The text of messages, and the text that the template writes before a response."""
        with _lock:
            return self._render(messages, tools, add_generation_prompt=True)[0]

    def encode(self, written: Sequence[Written]) -> tuple[Ragged, npt.NDArray[np.bool_]]:
        """Ids, and which of all of them are the assistant's."""
        ids: list[npt.NDArray[np.int32]] = []
        masks = [np.zeros(0, dtype=np.bool_)]
        engine = self.loaded.backend_tokenizer
        for start in range(0, len(written), AT_A_TIME):
            some = written[start : start + AT_A_TIME]
            encodings = engine.encode_batch([chat.text for chat in some], add_special_tokens=False)
            ids += Ragged.of_lists(encoding.ids for encoding in encodings).to_rows()
            for encoding, chat in zip(encodings, some, strict=True):
                places = chain.from_iterable(encoding.offsets)
                edges = np.fromiter(places, dtype=np.int64, count=2 * len(encoding))
                mask = np.zeros(len(encoding), dtype=np.bool_)
                for first, stop in chat.spans:  # all tokens that hold any of it
                    held = np.flatnonzero((edges[::2] < stop) & (edges[1::2] > first))
                    if first < stop and len(held):
                        mask[held[0] : held[-1] + 1] = True
                masks.append(mask)
        return Ragged.of_rows(ids), np.concatenate(masks)

    def _render(self, messages: Messages, tools: Tools, **options: bool) -> tuple[str, Spans]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        try:
            template = _apart(self.template(tools))
            named = {**options, **self.loaded.special_tokens_map, "chat_template": template}
            (text,), spans = render([messages], tools, **named)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise DataError(f"the chat template cannot write this conversation: {said}") from error
        _refuse_python(text, messages, tools)
        return text, [span for spans_of_one in spans for span in spans_of_one]

    def _spans(self, messages: Messages, tools: Tools, text: str, first: int) -> Spans:
        """Where the assistant speaks in the text: after its prompt, up to its turn's end mark."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first or not is_in_loss(message):
                continue
            last = number + 1 == len(messages)
            try:
                before = self._render(messages[:number], tools, add_generation_prompt=True)[0]
            except DataError:
                if number:
                    raise
                before = None  # the template has none for no message
            upto = text if last else self._render(messages[: number + 1], tools)[0]
            if before is None or not (upto.startswith(before) and text.startswith(upto)):
                why = "the template writes it differently when others follow"
                way = "mark the assistant's tokens by {% generation %} … {% endgeneration %} in template=..."
                raise DataError(f"the tokens of message {number} are not found, as {why}: {way}")
            content = message.get("content")
            said = upto[len(before) :]
            length = len(said.rstrip())
            if isinstance(content, str) and content in said:  # its own line ends stay
                length = max(length, said.find(content) + len(content))
            spans.append((len(before), len(before) + length))
        return spans


def _apart(template: str) -> str:
    """The template with a comment that no other program's has, and that writes nothing.

    transformers compiles a text once in a process, and up to 5.23 notes in the compiled template where the
    assistant speaks: a thread of the user's that renders the same text would note its parts in ours.
    A forked child would inherit a template in the middle of a conversation.
    """
    # Jinja drops a newline at the end. "+" keeps the spaces before the comment.
    return f"{LAST_NEWLINE.sub('', template)}{{#+ trainpipes {os.getpid()} #}}"


def _refuse_python(text: str, messages: Messages, tools: Tools) -> None:
    """Raise where the template has written content or arguments as Python shows lists and dicts."""
    for number, message in enumerate(messages):
        for value in (message.get("content"), *(f.get("arguments") for f in _functions(message))):
            if not isinstance(value, list | dict) or (shown := str(value)) not in text:
                continue
            if shown == json.dumps(value, ensure_ascii=False, default=str):
                continue
            if text.count(shown) > sum(t.count(shown) for t in _texts([messages, tools])):
                said = f"the template writes a part of message {number} as Python does, {cut(shown, 80)}"
                way = "make text of it with map(), or give a template=... that goes through it"
                raise DataError(f"{said}: {way}")


def _texts(value: Any) -> Iterator[str]:
    """All texts within lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _in_loss(spans: Spans, messages: Messages) -> Spans:
    """Without those of messages that are not in the loss."""
    trained = [is_in_loss(message) for message in messages if message["role"] == "assistant"]
    if all(trained):
        return spans
    if len(trained) != len(spans):
        said = f"the template marks {len(spans)} parts in {len(trained)} messages of the assistant"
        way = 'leave "weight" and "train" out with map(), or mark each message once in template=...'
        raise DataError(
            f"the parts of messages that are not in the loss are not found: {said}: {way}"
        )
    return [span for span, is_trained in zip(spans, trained, strict=True) if is_trained]


def is_in_loss(message: Mapping[str, Any]) -> bool:
    """Whether a message of the assistant is: OpenAI's files say it by "weight", others by "train"."""
    said = {key: message.get(key) for key in ("weight", "train")}
    for key, value in said.items():
        if value not in (None, 0, 1):
            rule = "0 or 1" if key == "weight" else "True or False"
            raise DataError(f'the "{key}" of a message is {rule}, got {value!r:.80}')
    return 0 not in said.values()


def messages_of(value: Any, parse_arguments: bool = True) -> list[dict[str, Any]]:
    """A conversation as transformers takes it, without nulls, which Arrow puts in for missing keys."""
    if not isinstance(value, list | tuple) or not value:
        got = f"{type(value).__name__}{' of none' if value is not None and not value else ''}"
        raise DataError(f"a conversation is a list of messages, one or more, got {got}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            rule = f'message {number} of a conversation is a dict with "role" and "content"'
            raise DataError(f"{rule}, got {message!r:.80}")
    messages: list[dict[str, Any]] = _filled(value)
    calling = messages if parse_arguments else []
    for function in (function for message in calling for function in _functions(message)):
        if isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except (ValueError, RecursionError):  # text of a model, which may be wrong
                continue
            if isinstance(arguments, dict):
                function["arguments"] = arguments
    return messages


def _functions(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions that a message calls, with their arguments."""
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [function for function in functions if isinstance(function, dict)]


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Tools as transformers takes them: of columns without nulls, which Arrow puts in for missing keys; of
    JSON text as it says, since schemas have nulls of their own. None where there are none, or a null.
    """
    try:
        tools = json.loads(value or "[]") if isinstance(value, str) else _filled(value)
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools or ()]
        if not all(isinstance(tool, Mapping) for tool in tools):
            raise TypeError("a schema is a dict")
        return tools or None
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"tools are a list of JSON schemas, got {value!r:.80} ({error})") from None


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _filled(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_filled(v) for v in value]
    return value
