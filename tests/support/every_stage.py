"""A small pipeline for each public stage, with that stage at each place where it can stand.

Tests of resuming and of elasticity go through all of them, and fail for a stage that is not here.
"""

from __future__ import annotations

import gzip
import inspect
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import torch
from torch.utils.data import BatchSampler, SubsetRandomSampler
from torchdata.nodes import IterableWrapper

import trainpipes as tp
from trainpipes import Pipeline
from trainpipes.interfaces.stage import Stage, snake_case
from trainpipes.pipeline import starts

Make = Callable[[Path], Pipeline]


@cache
def files(folder: Path) -> str:
    """Three Parquet files of 97 rows in uneven row groups, one of them without rows."""
    rng = np.random.default_rng(7)
    start = 0
    for number, groups in enumerate([(13, 1, 0, 20), (0,), (30, 33)]):
        path = folder / f"part-{number}.parquet"
        with pq.ParquetWriter(path, schema()) as writer:
            for rows in groups:
                ids = range(start, start + rows)
                ragged = [rng.integers(0, 9, int(rng.integers(0, 6))).tolist() for _ in ids]
                texts = [f"row {i} " + "and more " * (i % 4) for i in ids]
                columns = {
                    "x": ids,
                    "text": texts,
                    "answer": [f"a{i}" for i in ids],
                    "tokens": ragged,
                }
                writer.write_table(pa.table(columns, schema=schema()))
                start += rows
    return str(folder / "*.parquet")


@cache
def in_folders(folder: Path) -> str:
    """The same files, each in a folder that is named by a value."""
    for number, path in enumerate(sorted(Path(files(folder)).parent.glob("part-*.parquet"))):
        own = folder / "folders" / f"n={number}"
        own.mkdir(parents=True, exist_ok=True)
        (own / path.name).write_bytes(path.read_bytes())
    return str(folder / "folders")


def schema() -> pa.Schema:
    return pa.schema(
        [
            ("x", pa.int64()),
            ("text", pa.string()),
            ("answer", pa.string()),
            ("tokens", pa.list_(pa.int32())),
        ]
    )


def rows(folder: Path) -> Pipeline:
    return tp.list_files(files(folder)).read_parquet()


@cache
def mapped(folder: Path) -> str:
    """A memory map of 61 rows, one column of them ragged."""
    path = folder / "rows.memmap"
    rows = ({"x": n, "tokens": list(range(n % 7))} for n in range(61))
    tp.write_memmap(path, rows, overwrite=True)
    return str(path)


@cache
def arrow_files(folder: Path) -> list[str]:
    """The rows of the Parquet files in an Arrow file, a stream and a compressed Feather file."""
    rows = table(folder)
    paths = [folder / name for name in ("rows-0.arrow", "rows-1.arrows", "rows-2.feather")]
    with pa.ipc.new_file(paths[0], rows.schema) as file:
        file.write_table(rows.slice(0, 40), max_chunksize=13)
    with pa.ipc.new_stream(paths[1], rows.schema) as stream:
        stream.write_table(rows.slice(40, 41), max_chunksize=11)
    pyarrow.feather.write_feather(rows.slice(81), paths[2], compression="lz4", chunksize=9)
    return list(map(str, paths))


@cache
def of_delta(folder: Path) -> str:
    """The rows of the Parquet files as a Delta table of two files, and others in an older version."""
    from deltalake import write_deltalake

    rows, uri = table(folder), str(folder / "delta")
    write_deltalake(uri, rows.slice(0, 50).append_column("old", rows["x"].slice(0, 50)))
    write_deltalake(uri, rows.slice(50), mode="append", schema_mode="merge")
    return uri


@cache
def of_lance(folder: Path) -> str:
    """The rows of the Parquet files as a Lance table, and a version with some of them deleted."""
    from quiet_lance import lance

    uri = str(folder / "rows.lance")
    lance.write_dataset(table(folder), uri, max_rows_per_file=40).delete("x % 9 = 4")
    return uri


@cache
def of_iceberg(folder: Path) -> str:
    """The rows of the Parquet files as an Iceberg table of two files: the path of its metadata."""
    from pyiceberg.catalog import load_catalog

    lake = {
        "type": "sql",
        "warehouse": f"file://{folder}/lake",
        "uri": f"sqlite:///{folder}/lake.db",
    }
    with load_catalog("lake", **lake) as catalog:
        catalog.create_namespace("logs")
        iceberg = catalog.create_table("logs.rows", schema=table(folder).schema)
        iceberg.append(table(folder).slice(0, 50))
        iceberg.append(table(folder).slice(50))
        return str(iceberg.metadata_location).removeprefix("file://")


@cache
def text_files(folder: Path) -> dict[str, list[str]]:
    """The rows of the Parquet files as lines of JSON, compressed ones too, and some columns as CSV."""
    found = table(folder)
    lines = [json.dumps(row).encode() + b"\n" for row in found.to_pylist()]
    packed = [gzip.compress(b"".join(lines[n : n + 7]), mtime=0) for n in range(40, 97, 7)]
    paths = [folder / name for name in ("rows-0.jsonl", "rows-1.jsonl.gz", "rows.csv")]
    paths[0].write_bytes(b"".join(lines[:40]))
    paths[1].write_bytes(b"".join(packed))
    pyarrow.csv.write_csv(found.select(["x", "text"]), paths[2])
    return {"json": [str(paths[0]), str(paths[1])], "csv": [str(paths[2])]}


@cache
def numpy_files(folder: Path) -> list[str]:
    """Two files of arrays, 61 rows."""
    for number, (first, stop) in enumerate([(0, 40), (40, 61)]):
        x = np.arange(first, stop)
        np.savez(folder / f"rows-{number}.npz", x=x, y=np.stack([x, x * x], 1).astype(np.float32))
    return [str(folder / f"rows-{number}.npz") for number in range(2)]


@cache
def archives(folder: Path) -> list[str]:
    """Samples in an archive, and in one that is compressed."""
    for name, samples in (("a.tar", range(40)), ("b.tar.gz", range(40, 57))):
        with tarfile.open(folder / name, "w:gz" if name.endswith("gz") else "w") as archive:
            for n in samples:
                for kind, content in (("txt", f"text {n}"), ("cls", str(n % 5))):
                    member = tarfile.TarInfo(f"{n:04}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content.encode()))
    return [str(folder / "a.tar"), str(folder / "b.tar.gz")]


@cache
def images(folder: Path) -> Path:
    """Files that are called as images are, in folders of three classes, and four more."""
    for n in range(41):
        path = folder / "images" / f"class {n % 3}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"image {n}".encode())
    for n in range(4):
        (folder / "images" / f"{n}.csv").write_bytes(b"file_name,mark")
    return folder / "images"


@cache
def pictures(folder: Path) -> str:
    """PNG files of 12 to 16 pixels a side, in folders of three classes."""
    from PIL import Image

    rng = np.random.default_rng(7)
    for n in range(41):
        path = folder / "pictures" / f"class {n % 3}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (*rng.integers(12, 17, 2), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return str(folder / "pictures")


def decoded(folder: Path) -> Pipeline:
    rows = tp.read_images(pictures(folder), block_rows=5).sharding_filter(4).shuffle(7)
    return rows.drop_columns("path").decode_image()


@cache
def sounds(folder: Path) -> str:
    """WAV files of 0.1 to 0.5 s at 8,000 Hz, every fifth of two channels, and one that is cut off."""
    import soundfile

    rng = np.random.default_rng(8)
    (folder / "sounds").mkdir(exist_ok=True)
    for n in range(41):
        samples = rng.normal(0, 0.1, (int(rng.integers(800, 4000)), 1 + (n % 5 == 0)))
        soundfile.write(folder / "sounds" / f"{n}.wav", samples, 8000)
    (folder / "sounds" / "cut.wav").write_bytes((folder / "sounds" / "0.wav").read_bytes()[:400])
    return str(folder / "sounds")


def heard(folder: Path) -> Pipeline:
    rows = tp.read_bytes(sounds(folder), block_rows=5).rename({"bytes": "audio"})
    return rows.sharding_filter(4).shuffle(7)


@cache
def videos(folder: Path) -> str:
    """MP4 files of 6 to 20 frames of 16 x 24 pixels, 10 a second, and one that is cut off."""
    from video_fixtures import video

    rng = np.random.default_rng(9)
    (folder / "videos").mkdir(exist_ok=True)
    for n in range(17):
        count = int(rng.integers(6, 21))
        content = video(count, codec="mpeg4", rate=10, size=(16, 24), gop=5, seed=n)
        (folder / "videos" / f"{n:02}.mp4").write_bytes(content)
    (folder / "videos" / "cut.mp4").write_bytes(content[: len(content) // 2])
    return str(folder / "videos")


def watched(folder: Path) -> Pipeline:
    rows = tp.read_bytes(videos(folder), block_rows=3).rename({"bytes": "video"})
    return rows.sharding_filter(4).shuffle(7)


class Jitter:
    """Draws from torch's global generator, as transforms of torchvision do."""

    def __repr__(self) -> str:
        return "Jitter()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Jitter)

    def __hash__(self) -> int:
        return hash(Jitter)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image * torch.rand(3, 1, 1) % 200 + torch.randint(9, ())).to(torch.uint8)


def file_of_image(file: BinaryIO, block: int) -> Iterator[pa.Table]:
    """Two rows for each file, of two blocks."""
    yield pa.table({"x": [file.read().decode()], "block": [block]})


def count_images(file: BinaryIO) -> list[int]:
    return [1, 1]


class SavedRows:
    """What ``from_hf`` needs of a ``datasets.Dataset``: its table, and which rows of it are meant."""

    format: ClassVar = {"type": None, "columns": None}
    cache_files: ClassVar = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SavedRows) and self.data.table.equals(other.data.table)

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, rows: pa.Table, indices: list[int] | None = None) -> None:
        self.data = SimpleNamespace(table=rows)
        self._indices = (
            None if indices is None else pa.table({"indices": pa.array(indices, pa.uint64())})
        )

    def __len__(self) -> int:
        return len(self.data.table if self._indices is None else self._indices)


@cache
def bare(folder: Path) -> str:
    """A file of 307 token ids."""
    path = folder / "tokens.bin"
    np.arange(307, dtype=np.uint16).tofile(path)
    return str(path)


def sharded(folder: Path, shards: int = 12, buffer: int = 9) -> Pipeline:
    return rows(folder).sharding_filter(shards).shuffle(buffer, seed=3)


@cache
def table(folder: Path) -> pa.Table:
    """The rows of all files, in memory."""
    files(folder)
    paths = sorted(folder.glob("*.parquet"))  # other stages put files of theirs beside
    return pa.concat_tables([pq.read_table(path, schema=schema()) for path in paths])


def part(folder: Path, count: int, first: int = 0) -> Pipeline:
    """Some of the rows, shuffled: a source of a mix."""
    return tp.from_arrow(table(folder).slice(first, count)).shuffle(5, seed=first)


class Squares:
    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


SQUARES = Squares()
#: Rows of Python that go with those of files.
ANSWERS = [{"x": n, "answer": f"a{n}" if n % 3 else None} for n in range(61)]


def answers() -> pa.Table:
    """The same columns in other types."""
    schema = pa.schema([("answer", pa.large_string()), ("x", pa.int32())])
    return pa.table({"answer": ["b"] * 20, "x": range(200, 220)}, schema=schema)


SAMPLER = SubsetRandomSampler(range(5, 40))
NODE = IterableWrapper(range(61))
BATCHES = BatchSampler(SAMPLER, 4, False)


def count_61() -> Iterator[int]:
    return iter(range(61))


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": row["x"] * 2}


def double_pair(row: tuple[int, int]) -> tuple[int, int]:
    return row[0] * 2, row[1]


def jitter(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "noise": rng.random(), "more": rng.integers(1000)}


def jitter_all(batch: list[Any], rng: np.random.Generator) -> tuple[Any, float]:
    return batch, rng.normal()


def some_fail(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["x"], "word": row["text"].split()[3]}


def whole_sound(row: dict[str, Any]) -> bool:
    return not row["path"].endswith("cut.wav")


def whole_video(row: dict[str, Any]) -> bool:
    return not row["path"].endswith("cut.mp4")


def has_fourth(row: dict[str, Any]) -> bool:
    return some_fail(row)["word"] == "more"


def fourths(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of some rows two, and then an error."""
    return (some_fail({**row, "text": row["text"][n:]}) for n in (0, 1, 9))


def four_words(rows: pa.Table) -> pa.Table:
    if min(len(text.split()) for text in rows["text"].to_pylist()) < 4:
        raise ValueError("too few words")
    return rows.select(["x", "tokens"])


def odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


def parity(columns: dict[str, Any]) -> dict[str, Any]:
    return {"odd": columns["x"] % 2}


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    turns = [("user", row["text"]), ("assistant", row["answer"])]
    return {"x": row["x"], "messages": [{"role": who, "content": said} for who, said in turns]}


@cache
def chat_tokenizer() -> Any:
    """A byte-level tokenizer with a ChatML template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from tokenizer_fixtures import bpe_json

    found = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe_json()), eos_token="</s>", pad_token="<pad>"
    )
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return found


def words(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each word, none for the first rows."""
    return ({"x": row["x"], "word": word} for word in row["text"].split() if row["x"] > 2)


def tens(columns: dict[str, Any]) -> dict[str, Any]:
    return {"tens": columns["x"] // 10}


def negative(columns: dict[str, Any]) -> dict[str, Any]:
    return {"x": -columns["x"]}


def lengths(columns: dict[str, Any]) -> dict[str, Any]:
    return {"length": np.array([len(tokens) for tokens in columns["tokens"]])}


def tagged(rows: pa.Table) -> dict[str, Any]:
    """Tags as Python lists, whose type is found from the first rows."""
    return {"tags": [["odd"] if x % 2 else [] for x in rows.column("x").to_pylist()]}


def beside(rows: pa.Table) -> pa.Table:
    """The rows with a weight for each token."""
    return rows.append_column("weight", rows.column("input_ids"))


def codes(texts: list[str]) -> list[list[int]]:
    return [list(map(ord, text)) for text in texts]


def first_of(batch: list[Any]) -> Any:
    return batch[0]


def some(batch: list[Any]) -> bool:
    return len(batch[0]["text"]) > 9


PAIRS = {"text": "input_ids", "answer": "target_ids"}

#: Pipelines that end. The name says which stage it is for.
FINITE: dict[str, Make] = {
    "list_files": lambda f: (
        tp.list_files(sorted(map(str, Path(files(f)).parent.glob("*.parquet"))))
        .sharding_filter(4).shuffle(seed=1)
    ),
    "list_files / read": lambda f: tp.list_files(files(f)).shuffle(seed=1).read_parquet().batch(8),
    "read_parquet": lambda f: rows(f).batch(5),
    "read_parquet / filter": lambda f: (
        tp.read_parquet(files(f), ["text"], filter=(pc.field("x") > 9) & (pc.field("x") < 80))
        .sharding_filter(4).shuffle(9, seed=3).batch(4)
    ),
    "read_parquet / folders": lambda f: (
        tp.read_parquet(in_folders(f), partitioning="hive").sharding_filter(4).shuffle(9, seed=3).batch(4)
    ),
    "read_parquet / columns": lambda f: rows(f).sharding_filter(4).select("x").batch(4).collate(),
    "read_delta": lambda f: tp.read_delta(of_delta(f), 0).sharding_filter(4).shuffle(9, seed=3).batch(4),
    "read_delta / filter": lambda f: (
        tp.read_delta(of_delta(f), 1, ["text"], [["x", ">", 9]]).sharding_filter(4).shuffle(9).batch(4)
    ),
    "read_lance": lambda f: tp.read_lance(of_lance(f), 1).sharding_filter(4).shuffle(9).batch(4),
    "read_lance / drawn": lambda f: (
        tp.read_lance(of_lance(f), 2, ["x"]).sharding_filter(4).shuffle(scope="global").batch(4).collate()
    ),
    "read_iceberg": lambda f: (
        tp.read_iceberg(of_iceberg(f), "2999-01-01").sharding_filter(4).shuffle(9).batch(4)
    ),
    "read_arrow": lambda f: (
        tp.read_arrow(arrow_files(f)).sharding_filter(4).shuffle(7).batch(4).pad_collate()
    ),
    "read_arrow / drawn": lambda f: (
        tp.read_arrow(arrow_files(f)[:2], ["x"], block_rows=5).sharding_filter(4).shuffle(scope="global")
        .batch(4).collate()
    ),
    "read_json": lambda f: (
        tp.read_json(text_files(f)["json"], block_rows=9).sharding_filter(4).shuffle(7).batch(4)
        .pad_collate()
    ),
    "read_json / columns": lambda f: (
        tp.read_json(text_files(f)["json"], ["tokens", "x"], infer="all").batch(5)
    ),
    "read_csv": lambda f: (
        tp.read_csv(text_files(f)["csv"], block_rows=8).sharding_filter(4).shuffle(9).batch(4)
    ),
    "read_text": lambda f: (
        tp.read_text(text_files(f)["csv"], block_rows=11).sharding_filter(2).shuffle(9).batch(4)
    ),
    "from_hf": lambda f: (
        tp.from_hf(SavedRows(table(f), [*range(90, 20, -1), *range(30, 50)]), block_rows=11)
        .sharding_filter(4).shuffle(7).batch(4).pad_collate()
    ),
    "from_hf / drawn": lambda f: (
        tp.from_hf(SavedRows(table(f))).select("x").sharding_filter(4)
        .shuffle(scope="global").batch(4).collate()
    ),
    "read_webdataset": lambda f: (
        tp.read_webdataset(archives(f), text="txt", block_rows=9).sharding_filter(4).shuffle(7).batch(4)
    ),
    "read_webdataset / drawn": lambda f: (
        tp.read_webdataset(archives(f)[:1]).sharding_filter(4).shuffle(scope="global").batch(4)
    ),
    "read_bytes": lambda f: (
        tp.read_bytes(str(images(f) / "*.csv"), block_rows=1).sharding_filter(4).shuffle(2).batch(1).repeat(9)
    ),
    "read_images": lambda f: (
        tp.read_images(images(f), block_rows=5).sharding_filter(4).shuffle(7).batch(4)
    ),
    "read_files": lambda f: (
        tp.read_files(images(f), file_of_image, count_images).sharding_filter(4).shuffle(7).batch(4)
    ),
    "read_numpy": lambda f: (
        tp.read_numpy(numpy_files(f), block_rows=9).sharding_filter(4).shuffle(7).batch(4).collate()
    ),
    "read_numpy / drawn": lambda f: (
        tp.read_numpy(numpy_files(f), ["x"]).sharding_filter(4).shuffle(scope="global").batch(4).collate()
    ),
    "from_torchdata": lambda f: tp.from_torchdata(NODE).shuffle(7).batch(4),
    "concat": lambda f: (
        tp.concat(rows(f).select("x"), tp.from_arrow(pa.table({"x": range(100, 150)})))
        .sharding_filter(4).shuffle(20).batch(4).collate()
    ),
    "concat / drawn": lambda f: (
        tp.concat(*(tp.from_tensors(x=np.arange(n)) for n in (20, 0, 31))).sharding_filter(4)
        .shuffle(scope="global").batch(4).collate()
    ),
    "concat / in file order": lambda f: (
        tp.concat(tp.from_dataset(SQUARES), tp.from_dataset(SQUARES).map(double_pair)).skip(5).batch(4)
    ),
    "concat / of any kind": lambda f: (
        tp.concat(rows(f).select("x", "answer"), tp.from_dataset(ANSWERS), tp.from_arrow(answers()))
        .sharding_filter(4).shuffle(20).batch(4)
    ),
    "windows": lambda f: (
        rows(f).select("x", "tokens").windows(5, stride=3).sharding_filter(4).shuffle(9).batch(3)
    ),
    "windows / drawn": lambda f: (
        tp.from_arrow(table(f)).with_columns(tens, format="numpy").select("x", "tens")
        .windows(4, stride=1, within="tens").sharding_filter(4).shuffle(scope="global").batch(3).collate()
    ),
    "zip": lambda f: (
        rows(f).select("x", "text").zip(tp.from_arrow(pa.table({"y": range(97)}))).sharding_filter(4)
        .shuffle(20).batch(4).collate()
    ),
    "zip / drawn": lambda f: (
        tp.zip(tp.from_tensors(x=np.arange(51)), tp.from_arrow(pa.table({"y": range(51)}))).sharding_filter(4)
        .shuffle(scope="global").batch(4).collate()
    ),
    "zip / by number": lambda f: (
        tp.zip(tp.from_tensors(x=np.arange(51)), tp.from_tensors(y=np.arange(51.0))).sharding_filter(2)
        .shuffle(12).batch(4).collate()
    ),
    "zip / of any kind": lambda f: (
        tp.zip(rows(f).select("tokens").skip(3).take(60), tp.from_dataset(ANSWERS).take(60),
               tp.from_tensors(z=np.zeros((60, 2)))).sharding_filter(4).shuffle(9).batch(4)
    ),
    "zip / in file order": lambda f: (
        tp.zip(tp.from_dataset(SQUARES), tp.from_dataset(SQUARES)).skip(5).batch(4)
    ),
    "from_arrow": lambda f: tp.from_arrow(pa.table({"x": range(50)})).sharding_filter(4).batch(3).collate(),
    "from_dataset": lambda f: tp.from_dataset(SQUARES).sharding_filter(4).shuffle(7).batch(4).collate(),
    "from_dataset / sampler": lambda f: (
        tp.from_dataset(SQUARES, SAMPLER).sharding_filter(4).batch(3)
    ),
    "from_tensors": lambda f: (
        tp.from_tensors(x=np.arange(60.0), y=np.arange(120).reshape(60, 2))
        .sharding_filter(4).shuffle(7).batch(4).collate()
    ),
    "from_memmap": lambda f: (
        tp.from_memmap(mapped(f)).sharding_filter(4).shuffle(7).batch(4).pad_collate()
    ),
    "from_memmap / tokens": lambda f: (
        tp.from_memmap(bare(f), dtype="uint16", length=5, labels=True)
        .sharding_filter(4).shuffle(scope="global").batch(4).collate()
    ),
    "shuffle / drawn": lambda f: (
        tp.from_memmap(mapped(f)).sharding_filter(4)
        .shuffle(sampler=tp.samplers.WeightedRandomSampler(range(61), 50, seed=2)).batch(4).pad_collate()
    ),
    "shuffle / again": lambda f: sharded(f).map(double, version="1").shuffle(6, seed=3).batch(4),
    "shuffle / of batches": lambda f: sharded(f).batch(3).shuffle(4),
    "batch / of batches": lambda f: sharded(f).batch(3).batch(2),
    "shuffle / from_dataset": lambda f: tp.from_dataset(SQUARES, tp.samplers.RandomSampler(num_samples=140)),
    "shuffle / from_dataset, by torch": lambda f: (
        tp.from_dataset(SQUARES).shuffle(sampler=SAMPLER).sharding_filter(4).batch(3)
    ),
    "from_dataset / batches": lambda f: (
        tp.from_dataset(SQUARES, batch_sampler=BATCHES).sharding_filter(4).collate()
    ),
    "sample": lambda f: sharded(f).sample(0.6).batch(4),
    "sample / before": lambda f: rows(f).sample(0.6).sharding_filter(4).shuffle(9).batch(4),
    "sample / drawn": lambda f: (
        tp.from_arrow(pa.table({"x": range(50)})).sample(0.6, key="x").sharding_filter(4)
        .shuffle(scope="global", seed=4).batch(3).collate()
    ),
    "split": lambda f: (
        rows(f).split({"train": 0.7, "valid": 0.3}, key="answer")["train"]
        .sharding_filter(4).shuffle(9).batch(4)
    ),
    "from_iterable": lambda f: tp.from_iterable(count_61).shuffle(9).batch(4),
    "from_iterable / sharded": lambda f: (
        tp.from_iterable(count_61).skip(2).take(50).sharding_filter(4).shuffle(9).batch(4)
    ),
    "mix": lambda f: (
        tp.mix({"a": part(f, 24), "b": part(f, 15, 50)}, weights={"a": 0.6, "b": 0.4}, output_column="source")
        .sharding_filter(4).batch(3)
    ),
    "mix / first": lambda f: (
        tp.mix(
            {"a": part(f, 24), "b": part(f, 8, 50)}, stop="first_exhausted", max_epochs={"b": 2},
            weights={"a": 0.5, "b": 0.5},
        )
        .sharding_filter(4).batch(3)
    ),
    "mix / by size": lambda f: (
        tp.mix({"a": part(f, 12), "b": part(f, 6, 50)}, temperature=2.0).select("x")
    ),
    "mix / tokens": lambda f: (
        tp.mix(
            {"a": part(f, 24), "b": part(f, 15, 50)}, weights={"a": 2, "b": 1}, weight_by="tokens",
            column="tokens",
        )
        .sharding_filter(4).batch(3).pad_collate()
    ),
    "mix / filtered": lambda f: (
        tp.mix(
            {"a": part(f, 40).filter(odd), "b": part(f, 40, 30).filter(pc.field("x") > 33)},
            weights={"a": 1, "b": 3},
        )
        .sharding_filter(4).batch(4)
    ),
    "mix / max_epochs": lambda f: (
        tp.mix(
            {"a": part(f, 40), "b": part(f, 6)}, weights={"a": 1, "b": 1}, max_epochs={"b": 2},
        )
        .sharding_filter(4).batch(4)
    ),
    "mix / nested": lambda f: (
        tp.mix(
            {
                "a": tp.mix({"b": part(f, 20), "c": part(f, 9, 50)}, weights={"b": 1, "c": 1}),
                "b": rows(f).take(30),
            },
            weights={"a": 0.3, "b": 0.7},
        )
        .sharding_filter(4).filter(odd).batch(4)
    ),
    "mix / schedule": lambda f: (
        tp.mix(
            {"a": part(f, 24), "b": part(f, 12, 50), "c": part(f, 10, 70)},
            schedule=[(0, {"a": 1, "b": 0, "c": 1}), (30, {"a": 0, "b": 1, "c": 2})], interpolation="linear",
        )
        .sharding_filter(4).batch(4)
    ),
    "sharding_filter": lambda f: rows(f).sharding_filter(24).batch(2),
    "sharding_filter / stride": lambda f: rows(f).sharding_filter(6, split="stride").batch(4),
    "shuffle": lambda f: rows(f).shuffle(20).batch(4),
    "shuffle / rows": lambda f: sharded(f, buffer=4),
    "shuffle / global": lambda f: (
        tp.from_tensors(x=np.arange(61)).skip(3).sharding_filter(12).shuffle(scope="global").batch(4).collate()
    ),
    "shuffle / one span": lambda f: sharded(f, buffer=97).batch(4),
    "map": lambda f: sharded(f).map(double).batch(4).map(first_of),
    "map / rng": lambda f: (
        sharded(f).map(jitter, rng=True).map(jitter, rng=True, seed=1).batch(4).map(jitter_all, rng=True)
    ),
    "map / rng before": lambda f: (
        rows(f).map(jitter, rng=True).filter(odd).sharding_filter(4).shuffle(9).batch(4)
    ),
    "map / threads": lambda f: (
        sharded(f).map(jitter, rng=True, num_workers=2).batch(4).map(jitter_all, rng=True, num_workers=3)
    ),
    "map / skip": lambda f: sharded(f).map(some_fail, on_error="skip").batch(4),
    "map_batches": lambda f: sharded(f).map_batches(negative, format="numpy").batch(4).collate(),
    "map_batches / skip": lambda f: (
        rows(f).map_batches(four_words, on_error="skip").sharding_filter(4).shuffle(9).batch(4)
    ),
    "with_columns": lambda f: (
        sharded(f).with_columns(lengths, format="numpy").select("x", "length").batch(4).collate()
    ),
    "with_columns / before": lambda f: (
        rows(f).with_columns(negative, format="numpy").filter(odd).sharding_filter(4).shuffle(9).batch(4)
    ),
    "with_columns / Python values": lambda f: sharded(f).with_columns(tagged).batch(4),
    "drop_columns": lambda f: sharded(f).drop_columns("text", "tokens").batch(4),
    "filter": lambda f: sharded(f).filter(odd).batch(4),
    "filter / skip": lambda f: sharded(f).filter(has_fourth, on_error="skip").batch(4),
    "filter / before": lambda f: (
        rows(f).filter(pc.field("x") > 20)
        .sharding_filter(4).shuffle(9).batch(4)
    ),
    "filter / batches": lambda f: sharded(f).batch(4).filter(some),
    "flat_map": lambda f: sharded(f, 4).flat_map(words).batch(20).collate(),
    "flat_map / skip": lambda f: sharded(f, 4).flat_map(fourths, on_error="skip").batch(3).collate(),
    "flat_map / rows": lambda f: rows(f).shuffle(20).filter(odd).flat_map(words).take(60),
    "flat_map / packed": lambda f: (
        sharded(f, 4).flat_map(words).tokenize("bytes", "word").pack(40, buffer_size=32).batch(2)
    ),
    "deduplicate": lambda f: sharded(f, 4).deduplicate("text").batch(4),
    "deduplicate / epochs": lambda f: sharded(f).deduplicate(["text", "x"]).repeat(2).batch(4),
    "enumerate": lambda f: rows(f).skip(3).enumerate(2).sharding_filter(4).shuffle(9).batch(4),
    "enumerate / from_dataset": lambda f: tp.from_dataset(SQUARES).enumerate().sharding_filter(4).batch(4),
    "truncate": lambda f: sharded(f).truncate(3, columns="tokens", truncation_side="left").batch(4),
    "add_labels": lambda f: sharded(f).add_labels("tokens", ignore=[3]).batch(4),
    "chat_template": lambda f: (
        sharded(f).map(conversation).chat_template(chat_tokenizer(), max_length=60).batch(4).pad_collate()
    ),
    "encode_labels": lambda f: (
        sharded(f).encode_labels("answer", classes=[f"a{i}" for i in range(97)]).batch(4).pad_collate()
    ),
    "mask_tokens": lambda f: (
        sharded(f).tokenize("bytes").mask_tokens(0.3, mask_token_id=258, vocab_size=256).batch(4)
        .pad_collate()
    ),
    "mask_tokens / packed": lambda f: (
        sharded(f, 4).tokenize("bytes").select("input_ids").pack(60, buffer_size=24).select("input_ids")
        .mask_tokens(0.3, mask_token_id=258, vocab_size=256).batch(2)
    ),
    "decode_image": lambda f: (
        tp.read_images(pictures(f), block_rows=5).sharding_filter(4).shuffle(7).decode_image().batch(4)
    ),
    "decode_image / skip": lambda f: (
        tp.read_bytes([pictures(f), str(images(f))], block_rows=9).sharding_filter(4).shuffle(7)
        .decode_image(on_error="skip").batch(4)
    ),
    "audio_info": lambda f: (
        heard(f).filter(whole_sound).audio_info(sampling_rate=4000).filter(pc.field("audio_samples") > 600)
        .batch(4)
    ),
    "audio_info / skip": lambda f: (
        heard(f).audio_info(on_error="skip")
        .bucket_by_length(max_tokens=9000, column="audio_samples", buffer_size=12).decode_audio()
        .pad_collate(mask={"audio": "audio_mask"})
    ),
    "decode_audio": lambda f: (
        heard(f).filter(whole_sound).decode_audio(sampling_rate=4000).batch(4).pad_collate()
    ),
    "decode_audio / skip in batches": lambda f: (
        heard(f).batch(1).decode_audio(on_error="skip").pad_collate()
    ),
    "decode_audio / crop": lambda f: (
        heard(f).decode_audio(start=0.02, duration=tp.random_crop(0.05), on_error="skip").batch(4).collate()
    ),
    "log_mel": lambda f: (
        heard(f).decode_audio(on_error="skip").log_mel(8, sampling_rate=8000, time_first=True).batch(4)
        .pad_collate(lengths={"input_features": "frames"})
    ),
    "mask_spans": lambda f: (
        heard(f).decode_audio(on_error="skip").log_mel(8, sampling_rate=8000, pad_seconds=0.5)
        .mask_spans(2, 9, 1, 4, time_share=0.5).batch(4).collate()
    ),
    "mask_spans / samples": lambda f: (
        heard(f).filter(whole_sound).decode_audio().batch(4).mask_spans(2, 9, column="audio").pad_collate()
    ),
    "decode_video": lambda f: (
        watched(f).filter(whole_video).decode_video(num_frames=3, times_column="times").batch(4).collate()
    ),
    "decode_video / crop": lambda f: (
        watched(f).decode_video(fps=5, start=0.1, duration=tp.random_crop(0.4), size=8, on_error="skip")
        .flip(column="video").batch(4).collate()
    ),
    "resize": lambda f: decoded(f).resize((6, 5)).batch(4).collate(),
    "center_crop": lambda f: decoded(f).center_crop(8).batch(4).collate(),
    "random_crop": lambda f: decoded(f).random_crop((12, 9), padding=1).batch(4).collate(),
    "random_resized_crop": lambda f: decoded(f).random_resized_crop(7).batch(4).collate(),
    "flip": lambda f: decoded(f).flip().flip(0.3, direction="vertical").batch(4),
    "normalize": lambda f: decoded(f).center_crop(8).batch(4).collate().normalize(),
    "normalize / rows": lambda f: decoded(f).normalize(0.5, 0.25).batch(4),
    "image_transform": lambda f: (
        decoded(f).image_transform(Jitter()).image_transform(Jitter()).center_crop(8).batch(4).collate()
    ),
    "select": lambda f: sharded(f).select("x", "answer").batch(4),
    "rename": lambda f: sharded(f).rename({"x": "y"}).batch(4),
    "tokenize": lambda f: (
        sharded(f).tokenize("bytes", PAIRS, max_length=16, add_eos=True).batch(4).pad_collate()
    ),
    "tokenize / joined": lambda f: (
        sharded(f).tokenize("bytes", concat=["text", "answer"], labels="answer").batch(4).pad_collate()
    ),
    "cache": lambda f: (
        rows(f).tokenize("bytes", PAIRS).cache().sharding_filter(4).shuffle(9).batch(4).pad_collate()
    ),
    "cache / first": lambda f: rows(f).cache().sharding_filter(12).batch(4),
    "cache / filter": lambda f: (
        rows(f).filter(odd).map(double).cache().filter(pc.field("x") > 20)
        .sharding_filter(4).shuffle(9).batch(4)
    ),
    "cache / filter, in file order": lambda f: rows(f).filter(odd).cache().sharding_filter(4).batch(4),
    "batch": lambda f: sharded(f).batch(7),
    "batch / drop_last": lambda f: sharded(f).batch(7, drop_last=True),
    "batch / tokens": lambda f: (
        sharded(f, 4).batch(max_tokens=24, max_rows=6, column="tokens").pad_collate()
    ),
    "balance": lambda f: sharded(f, 4).batch(3).balance(4, column="tokens"),
    "balance / packed": lambda f: sharded(f, 4).pack(16, column="tokens").batch(2).balance(3),
    "bucket_by_length": lambda f: (
        sharded(f, 4).bucket_by_length(3, column="tokens", buffer_size=10, num_buckets=3)
    ),
    "bucket_by_length / tokens": lambda f: (
        rows(f).shuffle(20)
        .bucket_by_length(max_tokens=14, column="tokens", buffer_size=25, boundaries=[2, 4])
        .pad_collate()
    ),
    "pack": lambda f: sharded(f, 4).pack(12, column="tokens", buffer_size=8).batch(2).pad_collate(),
    "pack / rows": lambda f: sharded(f).pack(6, method="first_fit", column="tokens", max_documents=2),
    "pack / concat": lambda f: sharded(f, 4).pack(7, method="concat", column="tokens").batch(3),
    "tokenized_by": lambda f: (
        sharded(f).tokenized_by("bytes", "tokens").select("tokens").batch(4).pad_collate()
    ),
    "pack / tokenized": lambda f: (
        sharded(f, 4).tokenize("bytes", concat=["text", "answer"], add_eos=True, labels="answer")
        .pack(96, buffer_size=8).batch(2).pad_collate()
    ),
    "pack / kept": lambda f: (
        sharded(f, 4).pack(12, column="tokens", buffer_size=8, keep=["x", "text"]).batch(2).pad_collate()
    ),
    "pack / each epoch": lambda f: sharded(f, 4).pack(12, column="tokens", buffer_size=8).repeat(2).batch(4),
    "pack / across": lambda f: (
        sharded(f, 4).repeat(2).pack(9, method="concat", column="tokens", max_documents=3).batch(5)
    ),
    "pack / filtered": lambda f: (
        rows(f).shuffle(20).filter(odd).take(40).pack(8, column="tokens", buffer_size=7).take(15).batch(2)
    ),
    "pad_collate": lambda f: sharded(f).batch(4).pad_collate(pad_to_multiple_of=4),
    "collate": lambda f: sharded(f).select("x").batch(4).collate(),
    "sample_by": lambda f: sharded(f).sample_by("x", largest=97).batch(4),
    "sample_by / classes before": lambda f: (
        rows(f).with_columns(parity, format="numpy")
        .sample_by("odd", {0: 1, 1: 0.25}, expected={0: 49, 1: 48}).sharding_filter(4).shuffle(9).batch(4)
    ),
    "normalize_columns": lambda f: (
        sharded(f).select("x").normalize_columns({"x": {"mean": 48.0, "std": 28.0}}).batch(4)
        .collate(dtype=torch.float32)
    ),
    "encode_categories": lambda f: (
        sharded(f).encode_categories({"answer": ["a1", "a50"], "tokens": [3, 5]}).select("answer", "tokens")
        .batch(4).collate(ragged="offsets")
    ),
    "collate / offsets": lambda f: sharded(f).batch(4).collate(ragged="offsets"),
    "collate / arrow": lambda f: sharded(f).batch(4).collate(format="arrow"),
    "repeat": lambda f: sharded(f).batch(8).repeat(2),
    "repeat / rows": lambda f: rows(f).shuffle(9).repeat(2).batch(8),
    "take": lambda f: rows(f).take(40).sharding_filter(4).shuffle(9).batch(4),
    "take / batches": lambda f: sharded(f).batch(4).skip(3).take(15),
    "take / on the way": lambda f: rows(f).shuffle(20).filter(odd).take(30).batch(4),
    "skip": lambda f: rows(f).skip(11).sharding_filter(4).shuffle(9).batch(4),
    "skip / on the way": lambda f: rows(f).filter(odd).skip(7).batch(4),
    "to": lambda f: sharded(f).select("x").batch(4).collate().pin().to("cpu"),
    "to / filtered": lambda f: (
        sharded(f, 4).filter(odd).batch(4).collate(fn=list, version="1").to("cpu", depth=5)
    ),
    "pin": lambda f: sharded(f).select("x").batch(4).collate().pin(),
}  # fmt: skip

#: Pipelines without an end.
ENDLESS: dict[str, Make] = {
    "repeat / batches": lambda f: sharded(f).batch(8).repeat(),
    "repeat / across": lambda f: sharded(f).repeat().batch(8),
    "shuffle / global across": lambda f: (
        tp.from_dataset(SQUARES).sharding_filter(4).shuffle(scope="global").repeat().batch(8)
    ),
    "map / rng, endless": lambda f: sharded(f).map(jitter, rng=True).repeat().batch(8),
    "sample_by / endless": lambda f: sharded(f, 4).repeat().sample_by("x", largest=97).batch(4),
    "repeat / filtered": lambda f: sharded(f, 4).filter(odd).repeat().batch(4),
    "repeat / filtered batches": lambda f: sharded(f, 4).filter(odd).batch(4).repeat(),
    "batch / endless tokens": lambda f: (
        sharded(f, 4).repeat().batch(max_tokens=14, column="tokens")
    ),
    "bucket_by_length / endless": lambda f: (
        sharded(f, 4).bucket_by_length(3, column="tokens", buffer_size=10).repeat()
    ),
    "mask_tokens / endless across": lambda f: (
        sharded(f, 4)
        .repeat()
        .mask_tokens(0.5, column="tokens", mask_token_id=99, vocab_size=9, special_ids=[])
        .batch(5)
    ),
    "random_crop / endless across": lambda f: (
        decoded(f).repeat().random_crop(8).flip().batch(5).collate()
    ),
    "flat_map / endless": lambda f: sharded(f, 4).flat_map(words).repeat().batch(3),
    "pack / endless": lambda f: (
        sharded(f, 4).pack(8, column="tokens", buffer_size=5).repeat().batch(2)
    ),
    "pack / endless across": lambda f: (
        sharded(f, 4).repeat().pack(8, method="concat", column="tokens").batch(2).pad_collate()
    ),
    "take / across": lambda f: rows(f).shuffle(20).take(30).repeat().batch(4),
    "skip / across": lambda f: rows(f).filter(odd).skip(30).repeat().batch(4),
    "mix / repeat": lambda f: (
        tp.mix(
            {"a": part(f, 40), "b": part(f, 14, 50)},
            weights={"a": 0.6, "b": 0.4},
            stop="repeat",
            schedule=[(40, {"a": 0.2, "b": 0.8})],
        )
        .sharding_filter(4)
        .batch(2)
    ),
    "mix / endless tokens": lambda f: (
        tp.mix(
            {"a": part(f, 80).filter(odd), "b": part(f, 60, 30)},
            weights={"a": 0.6, "b": 0.4},
            stop="repeat",
            weight_by="tokens",
            column="tokens",
        )
        .sharding_filter(4)
        .pack(8, column="tokens", buffer_size=5)
        .batch(2)
    ),
    "mix / of any kind": lambda f: (
        tp.mix(
            {
                "a": rows(f).select("x", "answer"),
                "b": tp.from_dataset(ANSWERS),
                "c": tp.from_arrow(answers()),
            }
        )
        .sharding_filter(4)
        .repeat()
        .batch(3)
    ),
    "mix / rolling": lambda f: (
        tp.mix({"a": part(f, 40), "b": part(f, 30, 50)}).sharding_filter(4).repeat().batch(2)
    ),
    "to / endless": lambda f: sharded(f).select("x").batch(4).collate().repeat().to("cpu", depth=3),
    "repeat / part": lambda f: sharded(f).batch(4).skip(2).take(11).repeat(),
}


def public_stages() -> set[str]:
    """Names of all stages that a pipeline can have, as its methods and the starting functions."""
    import pkgutil
    from importlib import import_module

    found = set()
    for package in ("stages", "sources"):
        path = Path(tp.__file__).parent / package
        for module in pkgutil.walk_packages([str(path)], f"trainpipes.{package}."):
            for name, value in vars(import_module(module.name)).items():
                own = inspect.isclass(value) and value.__module__ == module.name
                if own and issubclass(value, Stage):
                    method = snake_case(name)
                    if hasattr(tp.Pipeline, method) or hasattr(starts, method):
                        found.add(value(**needed(value)).name)
    return found


def needed(stage: type[Stage]) -> dict[str, Any]:
    """Options without which a stage cannot be made."""
    return {
        "EncodeLabels": {"classes": 2}, "EncodeCategories": {"categories": {"x": [1]}},
        "NormalizeColumns": {"numbers": {"x": {"mean": 0, "std": 1}}}, "Deduplicate": {"columns": "x"},
        "ListFiles": {"urls": "x"}, "ReadDelta": {"uri": "x"}, "ReadLance": {"uri": "x"},
        "ReadIceberg": {"table": "x"},
        "FromArrow": {"table": pa.table({"x": [1]})},
        "FromHf": {"dataset": SavedRows(pa.table({"x": [1]}))},
        "FromDataset": {"dataset": [1]}, "FromTensors": {"tensors": ([1],)},
        "FromTorchdata": {"node": IterableWrapper([1])},
        "FromIterable": {"factory": list}, "ReadFiles": {"fn": len},
        "Map": {"fn": len}, "MapBatches": {"fn": len},
        "WithColumns": {"fn": len}, "DropColumns": {"columns": ["x"]},
        "Filter": {"predicate": len}, "Select": {"columns": ["x"]}, "Rename": {"names": {"x": "y"}},
        "ChatTemplate": {"tokenizer": chat_tokenizer()}, "FlatMap": {"fn": len},
        "Resize": {"size": 8}, "CenterCrop": {"size": 8}, "RandomCrop": {"size": 8},
        "RandomResizedCrop": {"size": 8}, "ImageTransform": {"transform": len},
        "Concat": {"pipelines": [tp.from_tensors([1])]}, "Zip": {"pipelines": [tp.from_tensors([1])]},
        "Windows": {"pipelines": [tp.from_tensors(x=[1])], "length": 1},
        "Tokenize": {"tokenizer": "bytes"}, "TokenizedBy": {"tokenizer": "bytes"},
        "FromMemmap": {"path": "x"},
        "Pack": {"max_length": 8}, "Truncate": {"max_length": 8}, "Sample": {"fraction": 0.5},
        "SampleBy": {"column": "x"},
        "To": {"device": "cpu"}, "Take": {"count": 1}, "Skip": {"count": 1},
        "Mix": {"sources": {"x": tp.from_dataset([1])}},
        "Split": {"parts": {"all": 1.0}, "part": "all"},
    }.get(stage.__name__, {})  # fmt: skip
