"""The data of every contestant: the source of Python's standard library, as text and as token ids.

Written once into a folder, and again where its settings differ:

    ids/part-000.parquet ...     input_ids: list<int32>
    text/part-000.parquet ...    text: string
    many/part-000.parquet ...    the files of ids, several times under other names
    tokenizer.json               byte-level BPE, trained on the same text
    made.json                    the settings; rows, tokens and digest of each
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.digest import of_ragged

__all__ = ["CHECK", "FULL", "QUICK", "TINY", "Data", "Sizes", "make"]

#: Rows have 20 to 288 tokens, each number about as often: 154 on average.
SHORTEST, LONGEST, AVERAGE = 20, 289, 154


@dataclass(frozen=True)
class Sizes:
    """How much data.

    Args:
        ids_rows: rows of token ids.
        text_rows: rows of text.
        buffer: rows of the shuffle buffer.
        files: files of each.
        groups: row groups of each file.
        copies: of each file of ids in ``many``.
        vocabulary: of the tokenizer.
        corpus_bytes: of the standard library's source, at most; it is gone through again as needed,
            cut at other places.
    """

    ids_rows: int
    text_rows: int
    buffer: int
    files: int = 8
    groups: int = 5
    copies: int = 8
    vocabulary: int = 16_384
    corpus_bytes: int = 16 << 20


FULL = Sizes(ids_rows=400_000, text_rows=100_000, buffer=40_960)
QUICK = Sizes(ids_rows=100_000, text_rows=24_000, buffer=8_192)
CHECK = Sizes(64_000, 16_000, 8_192, copies=16, vocabulary=8_192, corpus_bytes=4 << 20)
TINY = Sizes(1_200, 600, 128, files=3, groups=4, vocabulary=600, corpus_bytes=200_000)


@dataclass(frozen=True)
class Data:
    """What a contestant is given.

    Args:
        folder: where ``make`` wrote.
        text: the text, else the token ids.
        buffer: rows of the shuffle buffer.
        batch: rows of a batch.
        slow: from storage that takes 20 ms to answer.
        many: the token ids as often as ``Sizes.copies`` says.
    """

    folder: Path
    text: bool
    buffer: int
    batch: int = 32
    slow: bool = False
    many: bool = False

    @property
    def kind(self) -> str:
        return "text" if self.text else "many" if self.many else "ids"

    @property
    def column(self) -> str:
        return "text" if self.text else "input_ids"

    @property
    def files(self) -> list[str]:
        return [str(path) for path in sorted((self.folder / self.kind).glob("*.parquet"))]

    @property
    def url(self) -> str:
        """The folder of the files, as fsspec knows it."""
        folder = str((self.folder / self.kind).absolute())
        return f"slow://{folder}" if self.slow else folder

    @property
    def tokenizer(self) -> str:
        return str(self.folder / "tokenizer.json")

    @property
    def made(self) -> dict[str, Any]:
        """Rows, tokens and digest, as they were when the files were written."""
        found: dict[str, Any] = json.loads((self.folder / "made.json").read_text())[self.kind]
        return found

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return -(-int(self.made["rows"]) // self.batch)

    def converted(self, name: str) -> Path:
        """Where a contestant that needs a format of its own keeps it."""
        return self.folder / "converted" / f"{name}-{self.kind}"


def make(folder: Path, sizes: Sizes, tell: Any = lambda _: None) -> None:
    """Write the data, unless it is there already."""
    settings = {**asdict(sizes), "python": sysconfig.get_python_version(), "format": 2}
    made = folder / "made.json"
    if made.exists() and json.loads(made.read_text())["settings"] == settings:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    corpus = source(sizes.corpus_bytes)
    tell(f"training a tokenizer on {len(corpus) / 1e6:.0f} MB of source")
    tokenizer = train(corpus, sizes.vocabulary, folder / "tokenizer.json")
    drawn = pieces(corpus, 20 * 1_000, 3.0, np.random.Generator(np.random.Philox(7)))
    sample = list(islice(drawn, 0, None, 20))
    width = 3.0 * AVERAGE * len(sample) / len(encoded(tokenizer, sample).values)
    found: dict[str, Any] = {"settings": settings}
    for number, (kind, rows) in enumerate((("text", sizes.text_rows), ("ids", sizes.ids_rows))):
        texts = pieces(corpus, rows, width, np.random.Generator(np.random.Philox(number)))
        rows_a_file = -(-rows // sizes.files)
        count, tokens, digest = 0, 0, 0
        for part in range(sizes.files):
            tell(f"writing {kind}, file {part + 1} of {sizes.files}")
            held = list(islice(texts, rows_a_file))
            ids = encoded(tokenizer, held)
            table = pa.table({"input_ids": ids} if kind == "ids" else {"text": held})
            path = folder / kind / f"part-{part:03d}.parquet"
            path.parent.mkdir(exist_ok=True)
            pq.write_table(table, path, row_group_size=-(-rows_a_file // sizes.groups))
            count, tokens = count + len(held), tokens + len(ids.values)
            digest = (digest + of_ragged(ids)) % (1 << 64)
        found[kind] = {"rows": count, "tokens": tokens, "digest": f"{digest:016x}"}
    copy(folder, sizes, found)
    made.write_text(json.dumps(found, indent=1))


def copy(folder: Path, sizes: Sizes, found: dict[str, Any]) -> None:
    """The files of ids again and again, at no more bytes on the disk."""
    (folder / "many").mkdir()
    for part in sorted((folder / "ids").iterdir()):
        for number in range(sizes.copies):
            os.link(part, folder / "many" / f"{part.stem}-{number:02d}.parquet")
    once = found["ids"]
    digest = int(once["digest"], 16) * sizes.copies % (1 << 64)
    counts = {key: once[key] * sizes.copies for key in ("rows", "tokens")}
    found["many"] = {**counts, "digest": f"{digest:016x}"}


def source(most: int) -> str:
    """The standard library's files, one after the other."""
    root = Path(sysconfig.get_paths()["stdlib"])
    held, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if size >= most:
            break
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            held.append(path.read_text(encoding="utf-8", errors="ignore"))
            size += len(held[-1])
    return "\n".join(held)[:most]


def pieces(corpus: str, rows: int, width: float, rng: np.random.Generator) -> Iterator[str]:
    """``rows`` texts of 20 to 288 tokens of ``width`` characters, cut after whitespace."""
    start = 0
    for tokens in rng.integers(SHORTEST, LONGEST, rows):
        if start > len(corpus) - LONGEST * 8:
            start = int(rng.integers(0, 1000))
        stop = start + int(tokens * width)
        while not corpus[stop - 1].isspace():
            stop += 1
        yield corpus[start:stop]
        start = stop


def train(corpus: str, vocabulary: int, path: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = corpus[: 8 << 20].splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(path))
    return tokenizer


def encoded(tokenizer: Any, texts: list[str]) -> pa.ListArray:
    """Token ids of texts, ``list<int32>``."""
    rows = [
        np.array(encoding.ids, dtype=np.int32)
        for start in range(0, len(texts), 1000)
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 1000])
    ]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    values = np.concatenate(rows) if rows else np.empty(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
