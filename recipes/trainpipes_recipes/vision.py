"""A processor of transformers that is called for whole batches, and its identity."""

from __future__ import annotations

import copy
import inspect
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trainpipes import ConfigError, DataError
from trainpipes._internal.checks import need, require
from trainpipes.columns.packing import IGNORED
from trainpipes.tokenizers.adapters import load
from trainpipes.tokenizers.chat import Chat, Written, is_in_loss
from trainpipes.tokenizers.engine import Loaded, TokenizerEngine, digest

__all__ = ["Processor"]

#: The version of transformers from which on processors tell where they put pictures into texts.
OLDEST = "5.18"


class _Parts(NamedTuple):
    processor: Any
    chat: Chat | None  # None of one that is given a prompt and a suffix, as PaliGemma's


class Processor(Loaded):
    """A processor with an image processor, by name, folder or object.

    Conversations are written by its chat template. One that takes a suffix, as PaliGemma's does, writes a
    prompt and a response by itself.
    """

    def __init__(self, processor: Any, template: str | None = None) -> None:
        for package, oldest in (("transformers", OLDEST), ("PIL", "")):
            need(package, "vision_chat()", oldest)
        named = isinstance(processor, str | os.PathLike)
        good = named or all(hasattr(processor, name) for name in ("image_processor", "tokenizer"))
        rule = "a processor of transformers with an image processor, or the name or folder of one"
        require(good, "vision_chat(processor)", rule, processor)
        self._given, self._template = os.fspath(processor) if named else processor, template
        # The program goes on with the object, and may change it.
        self._kept = self._given if named else copy.deepcopy(processor)
        super().__init__()

    @classmethod
    def of(cls, processor: Any) -> Processor:
        """One of these, or one made of it."""
        return processor if isinstance(processor, cls) else cls(processor)

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in super().__getstate__().items() if k != "_copies"}
        return {**state, "_given": self._kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._copies = threading.local()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Processor):
            return NotImplemented
        return (self._given, self._template) == (other._given, other._template)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        processor = self._given
        return repr(processor) if isinstance(processor, str) else f"{type(processor).__name__}()"

    def _load(self) -> _Parts:
        processor = self._kept
        if isinstance(processor, str):
            processor = _by_name(processor)
        own_template = getattr(processor, "chat_template", None) or getattr(
            getattr(processor, "tokenizer", None), "chat_template", None
        )
        if isinstance(own_template, Mapping):
            own_template = own_template.get("default")
        template = self._template or own_template
        with_suffix = (
            template is None and "suffix" in inspect.signature(processor.__call__).parameters
        )
        if with_suffix and getattr(processor, "image_processor", None) is not None:
            return _Parts(processor, None)
        if getattr(processor, "image_processor", None) is None or template is None:
            lacks = "a chat template" if template is None else "an image processor"
            way = "give template=..." if template is None else "take one of a vision-language model"
            raise ConfigError(
                f"vision_chat(processor): {type(processor).__name__} lacks {lacks}: {way}"
            )
        return _Parts(processor, Chat(processor.tokenizer, template))

    @property
    def family(self) -> str:
        """The processor's class."""
        return type(self.loaded.processor).__name__

    @property
    def families(self) -> list[str]:
        """The processor's class, and those that it is derived from."""
        return [kind.__name__ for kind in type(self.loaded.processor).__mro__]

    @property
    def image_token(self) -> str | None:
        return getattr(self.loaded.processor, "image_token", None)

    def token_id(self, token: str) -> int | None:
        number = self.loaded.processor.tokenizer.convert_tokens_to_ids(token)
        return number if type(number) is int else None

    @property
    def engine(self) -> TokenizerEngine:
        return load(self.loaded.processor.tokenizer)

    @property
    def pad_id(self) -> int:
        number = self.loaded.processor.tokenizer.pad_token_id
        require(number is not None, "vision_chat(processor)", "one with a pad token", self.family)
        return int(number)

    def fingerprint(self) -> dict[str, Any]:
        """What shapes batches: class, backend and content, and the version of transformers."""
        from transformers import __version__

        processor, chat = self.loaded
        pictures = processor.image_processor
        said = {"processor": processor.to_dict(), "pictures": pictures.to_dict()}
        content = json.dumps(said, sort_keys=True, default=str)
        return {
            "class": self.family,
            "pictures": type(pictures).__name__,
            "backend": str(getattr(pictures, "backend", "")),
            "transformers": __version__,
            "content": digest(content.encode()),
            "tokenizer": self.engine.fingerprint(),
            "template": None if chat is None else chat.fingerprint(),
        }

    @property
    def _own(self) -> Any:
        """A copy for this thread: calls set options of the tokenizer."""
        entry = getattr(self._copies, "found", None)
        if entry is None or entry[0] != os.getpid():
            parts = self.loaded
            with self.turn:
                entry = self._copies.found = os.getpid(), copy.deepcopy(parts.processor)
        return entry[1]

    def write(self, messages: Sequence[Mapping[str, Any]]) -> Written:
        """A conversation's text, with a placeholder for each picture, and the assistant's spans."""
        chat = self.loaded.chat
        return self._prompt_and_suffix(messages) if chat is None else chat.write(messages)

    def _prompt_and_suffix(self, messages: Sequence[Mapping[str, Any]]) -> Written:
        roles = [message["role"] for message in messages]
        rule = f"{self.family} takes a prompt and a response"
        if roles != ["user", "assistant"]:
            raise DataError(f"{rule}, got the roles {roles}")
        if not is_in_loss(messages[1]):
            raise DataError(f"{rule}, got one that is not in the loss: leave such rows out")
        token = str(self.image_token)
        prompt, suffix = (
            "".join(part.get("text", token) for part in message["content"]) for message in messages
        )
        if token not in prompt:
            raise DataError(f"{self.family} takes prompts with a picture, got one without")
        return Written(prompt + suffix, [(len(prompt), len(prompt + suffix))])

    def _ids(self, written: Written) -> int:
        """How many ids the text has, before pictures are put into it."""
        if self.loaded.chat is not None:
            ids, _ = self.loaded.chat.encode([written])
            return int(ids.lengths[0])
        prompt, suffix = _cut(written)
        _, [text], *_ = self._own.prepare_inputs_layout(images=[], text=[prompt])
        tokenizer = self._own.tokenizer
        return len(tokenizer(text, text_pair=suffix + tokenizer.eos_token)["input_ids"])

    @property
    def counts(self) -> bool:
        """Whether the processor knows how many tokens a picture of a size has."""
        return hasattr(self.loaded.processor, "_get_num_multimodal_tokens")

    def length(self, written: Written, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of a row whose pictures have these heights and widths, if the processor counts."""
        ids = self._ids(written)
        if not sizes:
            return ids
        numbers = self._own._get_num_multimodal_tokens(image_sizes=[list(size) for size in sizes])
        return ids - len(sizes) + int(sum(numbers.num_image_tokens))

    def batch(
        self, written: Sequence[Written], pictures: Sequence[Sequence[Any]]
    ) -> dict[str, Any]:
        """What the processor makes of texts and their pictures, and labels."""
        if self.loaded.chat is None:
            return self._batch_of_suffixes(written, pictures)
        encoded = self._own(
            images=[list(some) for some in pictures] if any(pictures) else None,
            text=[talk.text for talk in written],
            padding=True, padding_side="right", add_special_tokens=False,
            return_offsets_mapping=True, return_text_replacement_offsets=True,
        )  # fmt: skip
        offsets = encoded.pop("offset_mapping")
        moved = encoded.pop("text_replacement_offsets", None) or [[]] * len(written)
        encoded.convert_to_tensors("pt")
        batch = dict(encoded)
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for row, talk in enumerate(written):
            edges = np.asarray(offsets[row], dtype=np.int64)
            mask = torch.from_numpy(_said(edges, talk.spans, moved[row]))
            labels[row, mask] = batch["input_ids"][row, mask]
        return {**batch, "labels": labels}

    def _batch_of_suffixes(
        self, written: Sequence[Written], pictures: Sequence[Sequence[Any]]
    ) -> dict[str, Any]:
        prompts, suffixes = zip(*map(_cut, written), strict=True)
        batch = self._own(
            images=[list(some) for some in pictures], text=[*prompts], suffix=[*suffixes],
            padding=True, padding_side="right",
        )  # fmt: skip
        batch.convert_to_tensors("pt")
        return dict(batch)


def _cut(written: Written) -> tuple[str, str]:
    """The prompt and the suffix of a text."""
    (start, _), *_ = written.spans
    return written.text[:start], written.text[start:]


def _said(edges: Any, spans: Sequence[tuple[int, int]], moved: Sequence[Mapping[str, Any]]) -> Any:
    """Which tokens are the assistant's, bool ``[L]``, where pictures were put into the text."""
    ends = [move["span"][1] for move in moved]
    gained = [0, *(move["new_span"][1] - move["span"][1] for move in moved)]

    def held(first: int, stop: int) -> Any:
        return (edges[:, 0] < stop) & (edges[:, 1] > first)

    said = np.zeros(len(edges), dtype=np.bool_)
    for span in spans:
        first, stop = (place + gained[bisect_right(ends, place)] for place in span)
        if first < stop:
            said |= held(first, stop)
    for move in moved:
        said &= ~held(*move["new_span"])
    return said


def _by_name(name: str) -> Any:
    from transformers import AutoProcessor

    folder = os.path.isdir(name)
    try:
        return AutoProcessor.from_pretrained(name, local_files_only=folder, trust_remote_code=False)
    except Exception as error:
        why = (str(error) or repr(error)).splitlines()[0]
        way = "give the folder of one, or the object"
        raise ConfigError(
            f"vision_chat(processor): AutoProcessor makes none of {name!r}: {why}; {way}"
        ) from error
