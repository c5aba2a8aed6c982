"""Stages on conversations with pictures: rows written and measured, batches made by a processor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY
from typing import Any

import numpy as np

import trainpipes as tp
from trainpipes._internal.checks import Count
from trainpipes.columns.run import Run
from trainpipes.interfaces.quarantine import LeftOut, OnBadRow, leaves_out
from trainpipes.interfaces.read_columns import at_row
from trainpipes.interfaces.stage import Tally, made_once
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.sources.files.list_files import checked_options
from trainpipes.stages.columns import CollatingStage
from trainpipes.tokenizers.chat import Written
from trainpipes.tokenizers.engine import TokenizerEngine
from trainpipes_recipes.chats import ROLES
from trainpipes_recipes.pictures import NoPicture, decoded, pictures_of, size_of
from trainpipes_recipes.vision import Processor
from trainpipes_recipes.vision_pack import check_packs, packed, rows_of
from trainpipes_recipes.vision_talks import conversation

__all__ = ["VisionBatches", "VisionRows"]

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
        made: list[Any] = []
        bad: dict[int, Exception] = {}
        for number, row in enumerate(block.rows()):
            try:
                made.append(self._made(row, int(block.ids[number])))
            except (NoPicture, tp.DataError) as error:
                if isinstance(error, tp.SchemaError):
                    raise
                if self.traits.keeps_rows:
                    raise self._refused(error, int(block.ids[number])) from error
                bad[number] = error
                made.append(None)
        run = run.with_block(block.with_data(made))
        if self.traits.keeps_rows:
            return run
        gone = np.array([number in bad for number in range(len(made))], dtype=np.bool_)
        self._left_out.drop(block, gone.astype(np.int64), lambda number: bad[number])
        return run.pick(np.flatnonzero(~gone)) if bad else run

    def _made(self, row: Any, number: int) -> dict[str, Any]:
        names = [self.messages] if isinstance(self.messages, str) else [*self.messages]
        columns = [*names, *([] if self.images is None else [self.images])]
        if not isinstance(row, Mapping) or not {*columns} <= {*row}:
            there = list(row) if isinstance(row, Mapping) else type(row).__name__
            raise tp.SchemaError(f"{self} needs the columns {columns}, and there are {there}")
        try:
            given = None if self.images is None else row[self.images]
            pictures = pictures_of(given, self._folder(number), self.storage_options)
        except NoPicture as error:
            raise NoPicture(f"column {self.images!r}: {error}") from None
        values = [row[name] for name in names]
        messages = conversation(values, len(pictures), {**ROLES, **(self.roles or {})}, names[0])
        written = self.processor.write(messages)
        token = self.processor.image_token
        if token is not None and written.text.count(token) != len(pictures):
            got = f"{written.text.count(token)} times {token} and {len(pictures)} pictures"
            raise tp.DataError(f"the text has one place for each picture, got {got}")
        made = {"text": written.text, "spans": written.spans, "images": pictures}
        length = made["length"] = self._length(written, pictures)
        if self.max_length is not None and length > self.max_length:
            rule = f"a row has at most max_length={self.max_length:,} tokens"
            raise tp.DataError(f"{rule}, got {length:,} with those of {len(pictures)} pictures")
        return made

    def _length(self, written: Written, pictures: Sequence[Any]) -> int:
        sizes = []
        for place, picture in enumerate(pictures):
            try:
                sizes.append(size_of(picture))
            except NoPicture as error:
                raise NoPicture(f"picture {place} of column {self.images!r}: {error}") from None
        if self.processor.counts or not pictures:
            length: int = self.processor.length(written, sizes)
            return length
        batch = self.processor.batch([written], [[*map(decoded, pictures)]])
        return int(batch["attention_mask"].sum())

    def _folder(self, number: int) -> str:
        """Where the row's file is."""
        place = None if self._inputs is None else self._inputs.place_of(number).path
        return "" if place is None else os.path.dirname(place)


class VisionBatches(OfPictures, CollatingStage, per_row=True):
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
        kept, pictures = [], []
        for row in rows:
            with suppress(NoPicture):  # the row is left out, or process() has raised
                pictures.append([*map(decoded, row["images"])])
                kept.append(row["length"])
        if self.max_length is None:
            return pictures
        packed: list[list[Any]] = [[] for _ in pictures]
        for place, some in zip(rows_of(kept, self.max_length), pictures, strict=True):
            packed[place] += some
        return packed

    def process(self, run: Run) -> Run:
        self._check_rows(run)
        bad: dict[int, Exception] = {}
        items: list[Any] = []
        for number, rows in enumerate(run.unroll()):
            first = 0 if run.bounds is None else int(run.bounds[number])
            kept, pictures = [], []
            for place, row in enumerate(rows):
                try:
                    pictures.append([*map(decoded, row["images"])])
                    kept.append(row)
                except NoPicture as error:
                    if self.traits.keeps_rows:
                        raise self._refused(error, int(run.block.ids[first + place])) from error
                    bad[first + place] = error
            items.append(self._batch(kept, pictures) if kept else None)
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
        made = batch["attention_mask"].sum(1).tolist()
        if lengths != made:
            said = (
                f"{self.processor.family} counts {lengths} tokens of rows, and makes {made} of them"
            )
            raise tp.DataError(f"{self}: {said}: leave packed out")
        return packed(batch, self.processor, rows_of(lengths, self.max_length), self.max_length)
