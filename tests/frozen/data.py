"""Small data of every kind, the same each time: files in a folder, and rows in memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq

ROWS = 97
WORDS = ["red", "green", "blue", "one", "two", "three", "four", "five"]
WORDS += ["up", "down", "left", "right"]
LABELS = ["cat", "dog", "eel"]

_folder: Path | None = None


def use(folder: str | Path) -> None:
    """Read files from ``folder``, where ``make`` has written them."""
    global _folder
    _folder = Path(folder)


def path(name: str) -> str:
    """Where a file is."""
    assert _folder is not None, "call data.use(folder) first"
    return str(_folder / name)


def own(name: str) -> str:
    """A path that one chain alone uses, for what it keeps on disk."""
    return path(f"own/{os.environ.get('FROZEN_CHAIN', 'none')}/{name}")


# Rows


def row(n: int) -> dict[str, Any]:
    """Row ``n`` of the base data."""
    return {
        "x": n,
        "text": " ".join(WORDS[(n * 7 + k * k) % 12] for k in range(1 + n * 5 % 7)),
        "answer": f"{WORDS[n % 12]} {n}",
        "tokens": [(n * 3 + k * 5) % 50 for k in range(n * 11 % 8)],
        "label": LABELS[n * n % 3],
        "score": None if n % 9 == 4 else n / 8 - 3,
        "flag": n % 5 == 2,
    }


SCHEMA = pa.schema([
    ("x", pa.int64()), ("text", pa.string()), ("answer", pa.string()), ("tokens", pa.list_(pa.int32())),
    ("label", pa.string()), ("score", pa.float64()), ("flag", pa.bool_()),
])  # fmt: skip


def rows(count: int = ROWS, first: int = 0) -> list[dict[str, Any]]:
    """Rows as dicts."""
    return [row(n) for n in range(first, first + count)]


def table(count: int = ROWS, first: int = 0, columns: list[str] | None = None) -> pa.Table:
    """Rows as a table, of several chunks."""
    found = pa.Table.from_pylist(rows(count, first), SCHEMA)
    found = pa.concat_tables([found.slice(0, 17), found.slice(17)])
    return found if columns is None else found.select(columns)


def narrow(count: int = 20, first: int = 200) -> pa.Table:
    """The columns x and answer in other types."""
    x = pa.array(range(first, first + count), pa.int32())
    answer = pa.array([f"b{n}" for n in range(count)], pa.large_string())
    return pa.table({"answer": answer, "x": x})


def conversations(layout: str = "openai", bad: bool = False) -> list[dict[str, Any]]:
    """Conversations of one to three turns; with ``bad`` every ninth has no response."""
    who, what = ("role", "content") if layout == "openai" else ("from", "value")
    names = ("user", "assistant") if layout == "openai" else ("human", "gpt")
    found = []
    for n in range(61):
        said = []
        for turn in range(1 + n % 3):
            said.append({who: names[0], what: f"{n} + {turn} =" + " hm" * (n % 4)})
            if not (bad and n % 9 == 3):
                said.append({who: names[1], what: f"= {n + turn}"})
        found.append(
            {"messages" if layout == "openai" else "conversations": said[: 2 * (1 + n % 3)]}
        )
    if bad:
        found = [
            {k: v[:1] if len(v) > 1 and v[1][who] == names[0] else v for k, v in f.items()}
            for f in found
        ]
    return found


def pairs(count: int = 61) -> list[dict[str, Any]]:
    """Prompts and responses."""
    return [
        {"prompt": f"{n} + {n} =" + " hm" * (n % 5), "response": f" {2 * n}" * (1 + n % 3)}
        for n in range(count)
    ]


def preferences(bad: bool = False) -> list[dict[str, Any]]:
    """Prompts with two responses; with ``bad`` some are empty."""
    return [
        {
            "prompt": f"{n} + 1 =",
            "chosen": "" if bad and n % 9 == 4 else f" {n + 1}!",
            "rejected": " no" * (1 + n % 4),
        }
        for n in range(61)
    ]


def token_rows(labels: bool = True) -> list[dict[str, Any]]:
    """Rows of token ids."""
    found: list[dict[str, Any]] = [{"input_ids": list(range(n * 5 % 11))} for n in range(80)]
    return [{**r, "labels": [7] * len(r["input_ids"])} if labels else r for r in found]


def pixels(count: int = 41, side: int = 9) -> dict[str, Any]:
    """Pictures as an array, and their classes."""
    size = count * 3 * side * side
    values = (np.arange(size, dtype=np.int64) * 7919 % 251).astype(np.uint8)
    return {"image": values.reshape(count, 3, side, side), "label": np.arange(count) * 5 % 7}


def vectors(count: int = 61, first: int = 0) -> dict[str, Any]:
    """Arrays of numbers."""
    x = np.arange(first, first + count)
    return {"x": x, "y": np.stack([x, x * x], 1).astype(np.float32)}


class Squares:
    """A map-style dataset of pairs."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class Records:
    """A map-style dataset of dicts, of several types."""

    def __init__(self, count: int = 53) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {"x": index, "pair": np.arange(2) + index, "text": WORDS[index % 12]}


def numbers(count: int = 61) -> Callable[[], Iterator[int]]:
    """Makes an iterator of numbers."""
    return Counting(count)


class Counting:
    """Makes an iterator of numbers each time it is called."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self) -> Iterator[int]:
        return iter(range(self.count))


class Generated:
    """Makes a generator of dicts each time it is called."""

    def __init__(self, count: int = 71, first: int = 0) -> None:
        self.count = count
        self.first = first

    def __call__(self) -> Iterator[dict[str, Any]]:
        for n in range(self.first, self.first + self.count):
            yield row(n)


# Files


def make(folder: Path) -> None:
    """Write all files into an empty folder."""
    from trainpipes import write_memmap

    use(folder)
    _parquet(folder)
    _arrow(folder)
    _text(folder)
    _arrays(folder)
    _archives(folder)
    _pictures(folder)
    mapped = [{"x": r["x"], "tokens": r["tokens"]} for r in rows(61)]
    write_memmap(folder / "map", mapped)
    write_memmap(folder / "flat", [{"x": r["x"], "half": r["x"] / 2} for r in rows(61)])
    (np.arange(307, dtype=np.uint16) * 7 % 300).tofile(folder / "tokens.bin")
    _tokenizers(folder)


def _parquet(folder: Path) -> None:
    base = table()
    (folder / "parquet").mkdir()
    start = 0
    for number, groups in enumerate([(13, 1, 0, 20), (0,), (30, 33)]):
        with pq.ParquetWriter(folder / f"parquet/part-{number}.parquet", SCHEMA) as writer:
            for size in groups:
                writer.write_table(base.slice(start, size), row_group_size=max(size, 1))
                start += size
    for number in range(3):
        where = folder / f"hive/part={'abc'[number]}"
        where.mkdir(parents=True)
        pq.write_table(base.slice(number * 25, 25), where / "rows.parquet", row_group_size=9)
    many = folder / "many"
    many.mkdir()
    for number in range(13):
        pq.write_table(base.slice(number * 7, 7), many / f"{number:02}.parquet", compression="zstd")
    pq.write_table(pa.Table.from_pylist(pairs()), folder / "pairs.parquet", row_group_size=8)
    pq.write_table(
        pa.Table.from_pylist(conversations()), folder / "chats.parquet", row_group_size=9
    )


def _arrow(folder: Path) -> None:
    base = table()
    (folder / "arrow").mkdir()
    with pa.ipc.new_file(folder / "arrow/0.arrow", SCHEMA) as file:
        file.write_table(base.slice(0, 40), max_chunksize=13)
    with pa.ipc.new_stream(folder / "arrow/1.arrows", SCHEMA) as stream:
        stream.write_table(base.slice(40, 41), max_chunksize=11)
    last = folder / "arrow/2.feather"
    pyarrow.feather.write_feather(base.slice(81), last, compression="lz4", chunksize=9)


def _text(folder: Path) -> None:
    lines = [json.dumps(r).encode() + b"\n" for r in rows()]
    (folder / "json").mkdir()
    (folder / "json/0.jsonl").write_bytes(b"".join(lines[:40]))
    packed = [gzip.compress(b"".join(lines[n : n + 7]), mtime=0) for n in range(40, 97, 7)]
    (folder / "json/1.jsonl.gz").write_bytes(b"".join(packed))
    (folder / "array.json").write_bytes(b"[" + b",".join(lines[:50]) + b"]")
    flat = table().select(["x", "text", "answer", "label", "score"])
    (folder / "csv").mkdir()
    pyarrow.csv.write_csv(flat.slice(0, 60), folder / "csv/0.csv")
    with gzip.GzipFile(folder / "csv/1.csv.gz", "wb", mtime=0) as file:
        pyarrow.csv.write_csv(flat.slice(60), file)
    options = pyarrow.csv.WriteOptions(delimiter="\t")
    pyarrow.csv.write_csv(flat.slice(0, 70), folder / "rows.tsv", options)
    (folder / "text").mkdir()
    texts = [r["text"] + ("\n" if n % 6 == 5 else "") for n, r in enumerate(rows(80))]
    (folder / "text/0.txt").write_text("\n".join(texts[:50]) + "\n")
    (folder / "text/1.txt").write_text("\n".join(texts[50:]))
    (folder / "text/2.txt.gz").write_bytes(gzip.compress(b"the\nlast\n\nones", mtime=0))
    (folder / "documents").mkdir()
    for number in range(17):
        (folder / f"documents/{number:02}.txt").write_text(rows()[number]["text"] + "\n\nand more")


def _arrays(folder: Path) -> None:
    (folder / "npz").mkdir()
    for number, (first, stop) in enumerate([(0, 40), (40, 61)]):
        np.savez(folder / f"npz/{number}.npz", **vectors(stop - first, first))
    (folder / "npy").mkdir()
    np.save(folder / "npy/0.npy", np.arange(120, dtype=np.float32).reshape(30, 4))
    np.save(folder / "npy/1.npy", np.arange(84, dtype=np.float32).reshape(21, 4) / 2)


def _archives(folder: Path) -> None:
    (folder / "tar").mkdir()
    for name, samples in (("a.tar", range(40)), ("b.tar.gz", range(40, 57))):
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as archive:
            for n in samples:
                for kind, content in (("txt", f"text {n}"), ("cls", str(n % 5))):
                    member = tarfile.TarInfo(f"{n:04}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content.encode()))
        data = raw.getvalue()
        if name.endswith("gz"):
            data = gzip.compress(data, mtime=0)
        (folder / "tar" / name).write_bytes(data)


def _pictures(folder: Path) -> None:
    from PIL import Image

    for n in range(31):
        where = folder / f"pictures/class {n % 3}/{n}.png"
        where.parent.mkdir(parents=True, exist_ok=True)
        high, wide = 12 + n % 5, 12 + n * 3 % 5
        values = (np.arange(high * wide * 3) * (7919 + n) % 251).astype(np.uint8)
        Image.fromarray(values.reshape(high, wide, 3)).save(where)
    for n in range(41):
        where = folder / f"blobs/class {n % 3}/{n}.png"
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(f"image {n}".encode())


def _tokenizers(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = ["[PAD]", "[MASK]", "[UNK]", "</s>", *WORDS, *"0123456789"]
    pieces += [f"##{d}" for d in range(10)]
    known = {piece: n for n, piece in enumerate(dict.fromkeys([*pieces, "+", "=", "hm"]))}
    made = Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[PAD]", "[MASK]", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", known["</s>"])]
    )
    made.save(str(folder / "words.json"))


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_chat: Any = None


def chat_tokenizer() -> Any:
    """A tokenizer of transformers: words and digits, with a ChatML template."""
    global _chat
    if _chat is None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        _chat = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")
        _chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        _chat.chat_template = CHATML
    return _chat
