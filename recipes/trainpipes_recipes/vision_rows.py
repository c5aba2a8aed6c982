"""Stages on conversations with pictures: rows written and measured, batches made by a processor.

Conversations come in common layouts; pictures as bytes, structs of bytes and path, paths, or arrays.

>>> (picture,) = pictures_of(np.zeros((3, 20, 30), np.uint8))
>>> size_of(picture), decoded(picture).size
((20, 30), (30, 20))
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch

import trainpipes as tp
from trainpipes._internal.checks import Count
from trainpipes.columns.run import Run
from trainpipes.errors import hidden
from trainpipes.filesystems.systems import open_system
from trainpipes.interfaces.quarantine import LeftOut, OnBadRow, leaves_out
from trainpipes.interfaces.read_columns import at_row
from trainpipes.interfaces.stage import Tally, made_once
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.sources.files.list_files import checked_options
from trainpipes.stages.columns import CollatingStage
from trainpipes.stages.decoding import FORMATS, NoPicture, picture_of
from trainpipes.tokenizers.chat import Written, messages_of
from trainpipes.tokenizers.engine import TokenizerEngine
from trainpipes_recipes.chats import ROLES, problem, to_messages
from trainpipes_recipes.vision import Processor
from trainpipes_recipes.vision_pack import check_packs, packed, rows_of

#: EXIF's tag of how a camera was held, and its values for pictures on their side.
ORIENTATION, ON_SIDE = 0x0112, (5, 6, 7, 8)


class Remote(NamedTuple):
    """A picture at a URL, and the options of its file system."""

    url: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return self.url


def pictures_of(
    value: Any, folder: str = "", options: Mapping[str, Any] | None = None
) -> list[Any]:
    """The pictures in a column of a row: a list of bytes, paths, or uint8 arrays ``[C, H, W]``.

    Args:
        value: a picture, a list of them, or None. A picture is an image file's bytes, its path, a
            dict with "bytes" or "path", or an array.
        folder: where relative paths start.
        options: of the file system of URLs; where the folder is a URL, too, only of URLs with the same
            scheme, as other ones may not take them.

    Raises:
        NoPicture: something else is there.
    """
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [_picture(picture, folder, options) for picture in value]
    return [_picture(value, folder, options)]


def _picture(value: Any, folder: str, options: Mapping[str, Any] | None) -> Any:
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        path = value if "://" in value else os.path.join(folder, value)
        if "://" not in path:
            return path
        same = _scheme(folder) in ("", _scheme(path))
        return Remote(path, (options or {}) if same else {})
    if isinstance(value, torch.Tensor):
        value = value.numpy(force=True)
    got = "null" if value is None else f"{value!r:.60} ({type(value).__name__})"
    if isinstance(value, np.ndarray):
        shaped = value.ndim == 3 and len(value) in (1, 3, 4) and value.size
        if shaped and value.dtype == np.uint8:
            return value
        got = f"an array {value.dtype} {[*value.shape]}"
    rule = "bytes, a path, a dict with one of these, or an array uint8 [C, H, W]"
    raise NoPicture(f"a picture is {rule}, got {got}")


def _scheme(path: str) -> str:
    return path.partition("://")[0] if "://" in path else ""


def size_of(picture: Any) -> tuple[int, int]:
    """Height and width in pixels, read from the first bytes and turned as EXIF says.

    Raises:
        NoPicture: these are no picture's, or there is no such file.
    """
    from PIL import Image

    if isinstance(picture, np.ndarray):
        return picture.shape[1], picture.shape[2]
    with _file(picture) as file:
        try:
            with Image.open(file, formats=FORMATS) as image:
                # Of a PNG without it Pillow would look behind the pixels.
                known = image.format != "PNG" or "exif" in image.info
                turned = known and image.getexif().get(ORIENTATION) in ON_SIDE
                width, height = image.size
        except Exception as error:  # of damaged files, plugins raise any error
            raise NoPicture(f"{type(error).__name__}: no picture that can be read") from error
    return (width, height) if turned else (height, width)


def decoded(picture: Any) -> Any:
    """An upright RGB image of Pillow's.

    Raises:
        NoPicture: it cannot be decoded, or there is no such file.
    """
    from PIL import Image

    if isinstance(picture, np.ndarray):
        rows = picture.transpose(1, 2, 0) if len(picture) > 1 else picture[0]
        return Image.fromarray(np.ascontiguousarray(rows)).convert("RGB")
    with _file(picture) as file:
        return picture_of(file.read(), "RGB")


@contextmanager
def _file(picture: Any) -> Iterator[Any]:
    if isinstance(picture, bytes):
        yield BytesIO(picture)
        return
    url, options = picture if isinstance(picture, Remote) else (picture, {})
    system, path = open_system(url, options)
    try:
        file = system.open(path, "rb")
    except Exception as error:  # each file system has errors of its own
        raise NoPicture(f"{hidden(url)} cannot be read ({type(error).__name__})") from error
    with file:
        yield file


#: How LLaVA's files mark a picture in a text.
MARK = "<image>"


def conversation(
    values: Sequence[Any], pictures: int, roles: Mapping[str, str], column: str
) -> list[dict[str, Any]]:
    """Messages whose content is a list of parts, with as many pictures as there are.

    Where no part is a picture, they stand where a text says ``<image>``, or else before the first
    text of the user.

    >>> from trainpipes_recipes.chats import ROLES
    >>> talk = [{"from": "human", "value": "<image>\\nA cat?"}, {"from": "gpt", "value": "Yes."}]
    >>> [user, _] = conversation([talk], 1, ROLES, "conversations")
    >>> user
    {'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': '\\nA cat?'}]}
    """
    value = values[0] if len(values) == 1 else _asked(*values)
    if as_json := isinstance(value, str | bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            rule = "a text is a conversation in JSON"
            raise tp.DataError(f"column {column!r}: {rule}: {error}") from None
    if isinstance(value, Mapping):  # of a sample in a tar
        value = next((value[name] for name in ("messages", "conversations") if name in value), None)
    talk = value if isinstance(value, list | tuple) else [] if value is None else [value]
    parts = [_parts(_content(message)) for message in talk]
    if not any(part["type"] == "image" for some in parts for part in some):
        marks = sum(part.get("text", "").count(MARK) for some in parts for part in some)
        if pictures and marks:
            _check_places(marks, pictures, column)
            parts = [[new for part in some for new in _split(part)] for some in parts]
        elif pictures and parts:
            speaks = [_role(message, roles) for message in talk]
            first = speaks.index("user") if "user" in speaks else 0
            if parts[first]:  # a null is no text, as is said below
                parts[first] = [{"type": "image"}] * pictures + parts[first]
    turns = [
        {**turn, "content": _text(some)} if isinstance(turn, Mapping) else turn
        for turn, some in zip(talk, parts, strict=True)
    ]
    try:
        read = to_messages(turns, roles, column)
    except tp.SchemaError as error:  # what a text holds is the row's own
        raise (tp.DataError(error.message) if as_json else error) from None
    if (wrong := problem(read)) is not None:
        raise tp.DataError(f"column {column!r}: {wrong}")
    held = sum(part["type"] == "image" for some in parts for part in some)
    _check_places(held, pictures, column)
    read = [{**turn, "content": some} for turn, some in zip(read, parts, strict=True)]
    return messages_of(read)


def _check_places(held: int, pictures: int, column: str) -> None:
    if held != pictures:
        rule = "a conversation has a place for each picture"
        raise tp.DataError(f"column {column!r}: {rule}, got {held} places and {pictures} pictures")


def _asked(prompt: Any, response: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _role(message: Any, roles: Mapping[str, str]) -> Any:
    role = message.get("role") or message.get("from") if isinstance(message, Mapping) else None
    return roles.get(role, role) if isinstance(role, str) else role


def _content(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return None
    return message.get("value") if message.get("content") is None else message["content"]


def _parts(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            parts.append({"type": "image"})
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            rule = (
                'a content is text or a list of {"type": "image"} and {"type": "text", "text": ...}'
            )
            raise tp.DataError(f"{rule}, got {part!r:.80}")
    return parts


def _split(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(part["text"].split(MARK)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def _text(parts: Sequence[Mapping[str, Any]]) -> str | None:
    return "".join(part.get("text", MARK) for part in parts) if parts else None


__all__ = [
    "NoPicture",
    "VisionBatches",
    "VisionRows",
    "conversation",
    "decoded",
    "pictures_of",
    "size_of",
]

WAY = 'fix it, or leave such rows out with on_error="skip"'


class OfPictures(RunStage):
    """A stage that leaves out rows that it cannot use, or raises for the first."""

    thread_safe = True

    def _traits(self) -> dict[str, Any]:
        return {"keeps_rows": not leaves_out(self.options["on_error"])}

    @made_once
    def _left_out(self) -> LeftOut:
        return LeftOut(self, "they are bad", "row", unit="", on_error=self.options["on_error"])

    def _tallies(self) -> Sequence[Tally]:
        return (self._left_out,)

    def _refused(self, error: Exception, row: int) -> tp.TrainpipesError:
        kind = tp.errors.UnreadableError if isinstance(error, NoPicture) else tp.DataError
        said = getattr(error, "message", str(error))
        return at_row(f"{self}: {said}; {WAY}", self, row, kind)


class VisionRows(OfPictures, per_row=True, gives="objects", asks_inputs=True):
    """Write each conversation with the processor's chat template, and measure it.

    A row becomes a dict with "text" (a placeholder for each picture), "spans" (where the assistant
    speaks in it), "images" (bytes, paths or arrays, not decoded), and "length", in tokens with
    those of its pictures. Sizes are read from the pictures' first bytes.

    Args:
        processor: a processor of transformers, or the name or folder of one.
        messages: the column of conversations; or two, of prompts and responses.
        images: the column of pictures; None if there are none.
        roles: other names of roles.
        max_length: the most tokens of a row; longer ones are bad.
        on_error: for bad rows: "raise"; or "skip" and log how many.
        storage_options: of the file system of pictures at URLs, as fsspec takes them; never shown or
            saved.

    Raises:
        UnreadableError: a picture is missing, or is none.
        DataError: roles are not in order, the number of pictures is not that of their places, or a
            row is too long.
    """

    free = frozenset({"storage_options"})

    processor: Any
    messages: str | Sequence[str]
    images: str | None = None
    _: KW_ONLY
    roles: Mapping[str, str] | None = None
    max_length: Count | None = None
    on_error: OnBadRow = "raise"
    storage_options: Mapping[str, Any] | None = None

    def check(self) -> None:
        self._set(processor=Processor.of(self.processor))
        if self.storage_options is not None:
            option = "vision_rows(storage_options)"
            self._set(storage_options=checked_options(self.storage_options, option))

    def process(self, run: Run) -> Run:
        self._check_rows(run, single=True)
        block = run.block
        outcomes: list[Any] = []
        bad: dict[int, Exception] = {}
        for number, row in enumerate(block.rows()):
            try:
                outcomes.append(self._made(row, int(block.ids[number])))
            except (NoPicture, tp.DataError) as error:
                if isinstance(error, tp.SchemaError):
                    raise
                if self.traits.keeps_rows:
                    raise self._refused(error, int(block.ids[number])) from error
                bad[number] = error
                outcomes.append(None)
        run = run.with_block(block.with_data(outcomes))
        if self.traits.keeps_rows:
            return run
        gone = np.array([number in bad for number in range(len(outcomes))], dtype=np.bool_)
        self._left_out.drop(block, gone.astype(np.int64), lambda number: bad[number])
        return run.pick(np.flatnonzero(~gone)) if bad else run

    def _made(self, row: Any, number: int) -> dict[str, Any]:
        names = [self.messages] if isinstance(self.messages, str) else [*self.messages]
        columns = [*names, *([] if self.images is None else [self.images])]
        if not isinstance(row, Mapping) or not {*columns} <= {*row}:
            there = list(row) if isinstance(row, Mapping) else type(row).__name__
            raise tp.SchemaError(f"{self} needs the columns {columns}, and there are {there}")
        try:
            pictures_given = None if self.images is None else row[self.images]
            pictures = pictures_of(pictures_given, self._folder(number), self.storage_options)
        except NoPicture as error:
            raise NoPicture(f"column {self.images!r}: {error}") from None
        values = [row[name] for name in names]
        messages = conversation(values, len(pictures), {**ROLES, **(self.roles or {})}, names[0])
        written = self.processor.write(messages)
        token = self.processor.image_token
        if token is not None and written.text.count(token) != len(pictures):
            got = f"{written.text.count(token)} times {token} and {len(pictures)} pictures"
            raise tp.DataError(f"the text has one place for each picture, got {got}")
        row_made = {"text": written.text, "spans": written.spans, "images": pictures}
        length = row_made["length"] = self._length(written, pictures)
        if self.max_length is not None and length > self.max_length:
            rule = f"a row has at most max_length={self.max_length:,} tokens"
            raise tp.DataError(f"{rule}, got {length:,} with those of {len(pictures)} pictures")
        return row_made

    def _length(self, written: Written, pictures: Sequence[Any]) -> int:
        sizes = []
        for place, picture in enumerate(pictures):
            try:
                sizes.append(size_of(picture))
            except NoPicture as error:
                raise NoPicture(f"picture {place} of column {self.images!r}: {error}") from None
        try:
            if self.processor.counts or not pictures:
                length: int = self.processor.length(written, sizes)
                return length
            batch = self.processor.batch([written], [[*map(decoded, pictures)]])
        except ValueError as error:  # as of a picture that is 200 times as long as it is wide
            if isinstance(error, tp.TrainpipesError):
                raise
            raise tp.DataError(f"{self.processor.family} refuses the row: {error}") from error
        return int(batch["attention_mask"].sum())

    def _folder(self, number: int) -> str:
        """Where the row's file is."""
        place = None if self._inputs is None else self._inputs.place_of(number).path
        return "" if place is None else os.path.dirname(place)


class VisionBatches(OfPictures, CollatingStage, per_row=True, asks_inputs=True):
    """Call the processor once for the rows of each batch.

    A batch is a dict with all that the processor gives, and "labels", int64 ``[B, L]``: the ids of
    what the assistant says, -100 elsewhere.

    Args:
        processor: as in ``VisionRows``, whose rows it takes.
        max_length: let the rows share rows of so many tokens, as ``PackBatches`` has put them.
        on_error: for pictures that cannot be decoded: "raise"; or "skip" their rows, and log how
            many. A batch without a row is left out.

    Raises:
        UnreadableError: a picture cannot be decoded.
    """

    processor: Any
    _: KW_ONLY
    max_length: Count | None = None
    on_error: OnBadRow = "raise"

    def check(self) -> None:
        self._set(processor=Processor.of(self.processor))
        if self.max_length is not None:
            check_packs(self.processor)

    @property
    def maker(self) -> TokenizerEngine:
        """The tokenizer, for ``show()``."""
        engine: TokenizerEngine = self.processor.engine
        return engine

    @property
    def id_columns(self) -> list[str]:
        return ["input_ids"]

    @property
    def picture_token(self) -> int | None:
        """The token of pictures, for ``show()``."""
        token = self.processor.image_token
        return None if token is None else self.processor.token_id(token)

    def pictures(self, rows: Sequence[Any]) -> list[list[Any]]:
        """The pictures of each row of a batch, for ``show()``."""
        lengths, pictures = [], []
        for row in rows:
            with suppress(NoPicture):  # the row is left out, or process() has raised
                pictures.append([*map(decoded, row["images"])])
                lengths.append(row["length"])
        if self.max_length is None:
            return pictures
        packed: list[list[Any]] = [[] for _ in pictures]
        for place, some in zip(rows_of(lengths, self.max_length), pictures, strict=True):
            packed[place] += some
        return packed

    def process(self, run: Run) -> Run:
        self._check_rows(run)
        bad: dict[int, Exception] = {}
        items: list[Any] = []
        for number, rows in enumerate(run.unroll()):
            first = 0 if run.bounds is None else int(run.bounds[number])
            rows_left, pictures = [], []
            for place, row in enumerate(rows):
                try:
                    pictures.append([*map(decoded, row["images"])])
                    rows_left.append(row)
                except NoPicture as error:
                    if self.traits.keeps_rows:
                        raise self._refused(error, int(run.block.ids[first + place])) from error
                    bad[first + place] = error
            items.append(self._batch(rows_left, pictures) if rows_left else None)
        run = run.with_items(items)
        if self.traits.keeps_rows:
            return run
        gone = np.zeros(len(run.block), dtype=np.int64)
        gone[[*bad]] = 1
        self._left_out.drop(run.block, gone, lambda place: bad[place])
        there = [number for number, item in enumerate(items) if item is not None]
        return run.pick(np.array(there, dtype=np.int64)) if len(there) < len(items) else run

    def _batch(self, rows: Sequence[Any], pictures: Sequence[Sequence[Any]]) -> dict[str, Any]:
        written = [Written(row["text"], [*map(tuple, row["spans"])]) for row in rows]
        batch: dict[str, Any] = self.processor.batch(written, pictures)
        if self.max_length is None:
            return batch
        lengths = [row["length"] for row in rows]
        actual = batch["attention_mask"].sum(1).tolist()
        if lengths != actual:
            said = f"{self.processor.family} counts {lengths} tokens of rows, and makes {actual} of them"
            raise tp.DataError(f"{self}: {said}: leave packed out")
        return packed(batch, self.processor, rows_of(lengths, self.max_length), self.max_length)
