"""Conversations as the tokenizer's own chat template writes them, and which tokens are the assistant's."""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainpipes.errors import ConfigError, DataError
from trainpipes.extra import need
from trainpipes.shown import shown
from trainpipes.tokenizers.content import digest

__all__ = ["Chat"]

#: What a template marks the assistant's part with, for transformers.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

#: Templates are compiled once for all tokenizers, and what tracks marked parts is part of them.
_lock = threading.Lock()


class Chat:
    """A chat template.

    Args:
        tokenizer: a transformers fast tokenizer, or a local directory of one.
        template: in place of the tokenizer's own, Jinja as transformers takes it.
    """

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        need("transformers", "a chat template")
        if isinstance(tokenizer, str | os.PathLike):
            if not os.path.isdir(tokenizer):
                raise ConfigError(
                    "chat_template(tokenizer) is a transformers tokenizer or a local directory of one, which "
                    f"has the template, got {shown(os.fspath(tokenizer))}"
                )
        elif not hasattr(tokenizer, "apply_chat_template"):
            raise ConfigError(
                "chat_template(tokenizer) is a transformers tokenizer or a local directory of one, which has "
                f"the template, got {type(tokenizer).__name__}"
            )
        self._tokenizer = tokenizer
        self._given = template
        self._loaded: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None}

    @property
    def loaded(self) -> Any:
        """A tokenizer of this process's own."""
        if self._loaded is None or self._loaded[0] != os.getpid():
            found = self._tokenizer
            if isinstance(found, str | os.PathLike):
                from transformers import AutoTokenizer

                found = AutoTokenizer.from_pretrained(found, local_files_only=True)
            else:
                found = copy.deepcopy(found)
            if not getattr(found, "is_fast", False):
                raise ConfigError(
                    "chat_template() needs a fast tokenizer, which says where in the text a token stands, "
                    f"got {type(found).__name__}"
                )
            self._loaded = os.getpid(), found
        return self._loaded[1]

    @property
    def template(self) -> str:
        """The template's text."""
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
        """What stands for the template in a checkpoint."""
        return digest(self.template.encode())

    def encode(self, messages: Any) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and of each whether the assistant says it.

        Raises:
            DataError: it is none, or the template writes a part otherwise once the rest follows, so that
                it cannot be told whose a token is.
        """
        told = _messages(messages)
        with _lock:
            if MARKED.search(self.template):
                found = self.loaded.apply_chat_template(
                    told, chat_template=self.template, tokenize=True, return_dict=True,
                    return_assistant_tokens_mask=True, truncation=False, padding=False,
                )  # fmt: skip
                return list(found["input_ids"]), [bool(m) for m in found["assistant_masks"]]
            text = self._text(told)
            spans = self._spans(told, text)
            found = self.loaded(
                text, add_special_tokens=False, return_offsets_mapping=True, truncation=False
            )
        offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(offsets), dtype=np.bool_)
        for start, stop in spans:
            mask |= (offsets[:, 1] > start) & (offsets[:, 0] < stop)
        return list(found["input_ids"]), mask.tolist()

    def _text(self, messages: Sequence[Any], prompt: bool = False) -> str:
        found: str = self.loaded.apply_chat_template(
            messages,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=prompt,
        )
        return found

    def _spans(self, messages: Sequence[Mapping[str, Any]], text: str) -> list[tuple[int, int]]:
        """Where in the text the assistant speaks: from the end of its prompt on, with the mark that ends
        its turn, without the line's end after that."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:number], prompt=True) if number else ""
            upto = self._text(messages[: number + 1])
            if not (upto.startswith(before) and text.startswith(upto)):
                raise DataError(
                    f"the chat template writes message {number} otherwise where it is the last one, or its "
                    "start is not what the assistant is prompted with, so that it cannot be told which "
                    "tokens are the assistant's: mark them in the template by {% generation %} … "
                    "{% endgeneration %}, and pass it as template=..."
                )
            content = message.get("content")
            said = upto[len(before) :]
            kept = len(said.rstrip())
            if isinstance(content, str):  # what the assistant ends with itself stays
                kept = max(kept, said.find(content) + len(content))
            spans.append((len(before), len(before) + kept))
        return spans


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages as transformers takes them: without keys that are null."""
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
    return [{k: v for k, v in message.items() if v is not None} for message in value]
