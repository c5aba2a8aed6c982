"""Files that are tokenized ahead give the batches that tokenizing on the way gives."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from bad_data import listed
from chats import small_tokenizer
from every_recipe import pairs, words
from trainpipes.prepare import tokenize
from trainpipes.sources.files.file_source import FileSource
from trainpipes.stages.tokenizing import TokenizedBy
from trainpipes.testing import digest
from trainpipes.writers import Processes, Threads
from unfinished import begun_again, row_groups

SMALL: dict[str, Any] = {"batch_size": 4, "buffer_size": 16, "num_shards": 12, "seed": 3}
Make = Callable[[Any], tp.Pipeline]


def rows() -> list[dict[str, Any]]:
    """Rows that every recipe finds its columns in."""
    found = []
    for k, row in enumerate(pairs()):
        turn = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": f"= {2 * k}"},
        ]
        found.append(
            {
                **row, "text": row["prompt"], "messages": turn * (1 + k % 3), "label": "abc"[k % 3],
                "labels": ["abc"[k % 3], "abc"[k % 2]], "chosen": f" {k}!", "rejected": " no" * (1 + k % 4),
                "premise": row["prompt"], "hypothesis": f"{k}",
            }
        )  # fmt: skip
    return found


def parquet(folder: Path, groups: Any = ((13, 1, 0, 20), (), (0,), (30, 33)), **more: Any) -> str:
    """Four files in uneven row groups, one of them without any, one with an empty one."""
    folder.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(rows())
    start = 0
    for number, lengths in enumerate(groups):
        with pq.ParquetWriter(folder / f"text-{number}.parquet", table.schema, **more) as writer:
            for length in lengths:
                writer.write_table(table.slice(start, length))
                start += length
    return str(folder)


def batches(pipe: tp.Pipeline, most: int = 60) -> list[str]:
    """Of two epochs, as many as there are."""
    return [digest(batch) for batch in itertools.islice(itertools.chain(pipe, pipe), most)]


def check_same(wanted: tp.Pipeline, *others: tp.Pipeline) -> None:
    expected = batches(wanted)
    assert expected
    for other in others:
        assert batches(other) == expected


RECIPES: dict[str, Make] = {
    "pretrain": lambda f: tp.recipe("pretrain", f, "bytes", max_length=64, **{**SMALL, "num_shards": 2}),
    "pretrain / concat": lambda f: tp.recipe(
        "pretrain", f, "bytes", max_length=32, method="concat", add_eos=257, **SMALL
    ),
    "masked_lm": lambda f: tp.recipe("masked_lm", f, words(), **SMALL),
    "masked_lm / cut": lambda f: tp.recipe("masked_lm", f, words(), max_length=5, **SMALL),
    "sft": lambda f: tp.recipe("sft", f, "bytes", max_length=30, **SMALL),
    "seq2seq": lambda f: tp.recipe("seq2seq", f, "bytes", **SMALL),
    "chat": lambda f: tp.recipe("chat", f, small_tokenizer(), **SMALL),
    "chat / packed": lambda f: tp.recipe("chat", f, small_tokenizer(), packed=True, max_length=128, **SMALL),
    "preference": lambda f: tp.recipe("preference", f, "bytes", **SMALL),
    "classification": lambda f: tp.recipe("classification", f, words(), label="label", **SMALL),
    "classification / several": lambda f: tp.recipe("classification", f, "bytes", label="labels", **SMALL),
    "sft / evaluated": lambda f: tp.recipe("sft", f, "bytes", train=False, **SMALL),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_the_same_batches_of_files_that_are_tokenized(name, tmp_path):
    make = RECIPES[name]
    files = parquet(tmp_path / "in")
    done = tokenize(make(files), tmp_path / "out")
    assert done.rows == done.read == 97
    assert len(done.files) == 4
    check_same(make(files), done.pipeline, make(done.folder))  # the recipe finds out by itself
    done.verify()


def test_files_have_the_row_groups_of_those_they_are_made_of(tmp_path):
    files = parquet(tmp_path / "in")
    tokenize(RECIPES["sft"](files), tmp_path / "out")
    groups = row_groups(sorted((tmp_path / "out").glob("*.parquet")))
    assert groups == [[13, 1, 0, 20], [], [0], [30, 33]]


def chain(rows: tp.Pipeline) -> tp.Pipeline:
    return (
        rows.tokenize(words(), "text", max_length=9)
        .sharding_filter(12).shuffle(16, seed=3).batch(4).pad_collate()
    )  # fmt: skip


def texts(folder: Path) -> dict[str, Callable[[], tp.Pipeline]]:
    """Files of several formats, some of them empty."""
    found = [row["text"] for row in rows()]
    parts = [found[:40], [], found[40:41], found[41:]]
    for number, part in enumerate(parts):
        lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in part).encode()
        (folder / f"b-{number}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
        (folder / f"c-{number}.txt").write_text("".join(f"{text}\n" for text in part))
        table = pa.table({"text": pa.array(part, pa.string())})
        with pa.ipc.new_file(folder / f"e-{number}.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=11)
    return {
        "gzip": lambda: tp.read_json(f"{folder}/b-*.jsonl.gz", columns=["text"], block_rows=13),
        "text": lambda: tp.read_text(f"{folder}/c-*.txt", block_rows=13),
        "arrow": lambda: tp.read_arrow(f"{folder}/e-*.arrow"),
    }


@pytest.mark.parametrize("name", ["gzip", "text", "arrow"])
def test_files_of_any_format_give_the_same_batches(name, tmp_path):
    make = texts(tmp_path)[name]
    done = tokenize(chain(make()), tmp_path / "out ñ 1")
    assert (done.rows, len(done.files)) == (97, 4)
    check_same(chain(make()), done.pipeline)


def test_a_large_file_becomes_several_and_the_batches_stay(tmp_path):
    files = parquet(tmp_path / "in", [[7] * 13, [6]])
    done = tokenize(RECIPES["sft"](files), tmp_path / "out", bytes_per_file=5_000)
    whole = tokenize(RECIPES["sft"](files), tmp_path / "whole")
    assert len(done.files) > 2 == len(whole.files)
    assert done.rows == whole.rows == 97
    check_same(whole.pipeline, done.pipeline)
    entries = json.loads((tmp_path / "out" / "_manifest.json").read_text())["files"]
    assert {entry["notes"]["source"] for entry in entries} == {"text-0.parquet", "text-1.parquet"}
    assert sum(entry["notes"]["tokens"] for entry in entries) == done.tokens


def test_files_are_cut_by_the_bytes_of_their_row_groups(tmp_path):
    drawn = np.random.default_rng(0)
    texts = [drawn.bytes(2000 if n < 5 else 20).hex() for n in range(20)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet", row_group_size=5)
    rows = tp.read_parquet(tmp_path / "rows.parquet").tokenize("bytes")
    done = tokenize(rows, tmp_path / "out", bytes_per_file=8_000)
    assert [pq.read_metadata(file).num_rows for file in done.files] == [5, 15]


def packed(rows: tp.Pipeline) -> tp.Pipeline:
    return rows.sharding_filter(12).shuffle(16).batch(4).pad_collate()


LONG = pc.greater(pc.list_value_length(pc.field("input_ids")), 8)
CHAINS: dict[str, Callable[[tp.Pipeline, Path], tp.Pipeline]] = {
    "take": lambda rows, _: chain(rows.take(50).select("text")),
    "skip": lambda rows, _: chain(rows.skip(20).take(60).select("text")),
    "select": lambda rows, _: chain(rows.select("text")),
    "cache": lambda rows, f: packed(rows.select("text").tokenize("bytes").cache(f / "cache")),
    "filter after": lambda rows, _: packed(rows.select("text").tokenize("bytes").filter(LONG)),
    "repeat": lambda rows, _: (
        rows.shuffle(16).sharding_filter(12).repeat(3).tokenize("bytes", "text").select("input_ids")
        .batch(4).pad_collate()
    ),
    "rename": lambda rows, _: packed(
        rows.tokenize(words(), "text").rename({"input_ids": "ids"}).truncate(5, columns="ids").select("ids")
    ),
    "with columns": lambda rows, _: chain(
        rows.drop_columns("label").with_columns(upper, format="arrow")
    ),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CHAINS)
def test_chains_give_the_same_batches(name, tmp_path):
    files = parquet(tmp_path / "in")

    def made() -> tp.Pipeline:
        return CHAINS[name](tp.list_files(files).read_parquet(columns=["text", "label"]), tmp_path)

    done = tokenize(made(), tmp_path / "out")
    check_same(made(), done.pipeline)


def upper(table: pa.Table) -> dict[str, Any]:
    return {"text": pc.utf8_upper(table["text"])}


def long_text(row: dict[str, Any]) -> bool:
    return len(row["text"]) > 12


def test_where_rows_are_dropped_before_the_ids_all_others_come(tmp_path):
    files = parquet(tmp_path / "in")

    def made() -> tp.Pipeline:
        rows = tp.list_files(files).read_parquet(columns=["text"]).filter(long_text)
        return rows.map(dict).tokenize("bytes").shuffle(16).batch(4)

    done = tokenize(made(), tmp_path / "out")
    assert 0 < done.rows < done.read == 97
    found, wanted = (
        sorted(list(map(int, row["input_ids"])) for batch in pipe for row in batch)
        for pipe in (done.pipeline, made())
    )
    assert found == wanted


# Bare ids


def test_rows_that_are_left_out_are_listed_once(tmp_path):
    pq.write_table(pa.table({"text": ["a", None, *"bcde"] * 5}), tmp_path / "a.parquet")
    texts, bad = tp.read_parquet(tmp_path / "a.parquet"), tmp_path / "bad"
    done = tokenize(texts.tokenize("bytes", on_error=tp.Quarantine(bad)), tmp_path / "ids")
    rows_left_out = sorted(line["row"] for line in listed(bad))
    assert (done.rows, rows_left_out) == (25, [1, 7, 13, 19, 25])


def test_bare_ids_are_the_documents_one_after_the_other(tmp_path):
    files = parquet(tmp_path / "in")
    made = RECIPES["pretrain"]
    done = tokenize(made(files), tmp_path / "out", format="bin")
    assert (done.dtype, len(done.files)) == ("uint16", 4)
    found = np.concatenate([np.fromfile(path, np.uint16) for path in done.files]).tolist()
    wanted = [token for row in rows() for token in [*row["text"].encode(), 256]]
    assert found == wanted
    assert done.tokens == len(wanted)
    batch = tp.recipe(
        "tokens", list(done.files), dtype="uint16", max_length=64, batch_size=2
    ).peek()
    assert batch["input_ids"].shape == (2, 64)
    with pytest.raises(tp.ConfigError, match="from_memmap"):
        _ = done.pipeline


def test_bare_ids_are_as_wide_as_the_vocabulary(tmp_path):
    files = parquet(tmp_path / "in")

    def wide(texts: list[str]) -> list[list[int]]:
        return [[70_000 + len(text)] for text in texts]

    pipe = tp.list_files(files).read_parquet(columns=["text"]).tokenize(wide)
    assert tokenize(pipe, tmp_path / "wide", format="bin").dtype == "uint32"
    with pytest.raises(tp.DataError, match=r"a token 70,?0\d\d, which that type cannot hold"):
        tokenize(pipe, tmp_path / "out", format="bin", dtype="uint16")
    assert not (tmp_path / "out").exists()


# Refused


def no_texts(files: str) -> tp.Pipeline:
    return tp.list_files(files).read_parquet(columns=["label"]).shuffle(4)


def read(files: str) -> tp.Pipeline:
    return tp.list_files(files).read_parquet(columns=["text"])


REFUSED: dict[str, tuple[Make, str]] = {
    "no ids": (no_texts, "one with tokenize.* or chat_template"),
    "ids already": (lambda f: read(f).then(TokenizedBy("bytes", "text")), "of texts, and not of token ids"),
    "a mix": (
        lambda f: tp.mix({"a": read(f), "b": read(f)}).tokenize("bytes"),
        "prepare each of its sources",
    ),
    "rows in memory": (
        lambda f: tp.from_arrow(pa.table({"text": ["a"]})).tokenize("bytes"),
        "one that reads files of rows, got from_arrow",
    ),
    "whole files": (
        lambda f: tp.read_bytes(f).rename({"path": "text"}).tokenize("bytes"),
        "one that reads files of rows, got read_bytes",
    ),
    "a stream": (
        lambda f: tp.from_iterable(lambda: iter([{"text": "a"}])).tokenize("bytes"),
        "one that reads files",
    ),
    "draws": (
        lambda f: read(f).map(drawn, rng=True).tokenize("bytes"),
        "before tokenize.. must be one that gives the same in every epoch, got map",
    ),
    "what cannot train": (
        lambda f: read(f).tokenize("bytes").mask_tokens().batch(2).pad_collate(), "needs the mask token"
    ),
    "rows of rows": (lambda f: read(f).flat_map(several).tokenize("bytes"), "by itself, got flat_map"),
    "batches": (lambda f: read(f).batch(2).tokenize("bytes"), "by itself, got batch.2."),
}  # fmt: skip


def drawn(row: Any, rng: Any) -> Any:
    return row


def several(row: Any) -> list[Any]:
    return [row, row]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_ahead_is_refused_with_why(name, tmp_path):
    make, message = REFUSED[name]
    with pytest.raises(tp.ConfigError, match=message):
        tokenize(make(parquet(tmp_path / "in")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, '"parquet" or "bin", got \'csv\''),
        ({"dtype": "uint16"}, 'left out with format="parquet"'),
        ({"format": "bin", "dtype": "float32"}, "dtype. must be"),
        ({"format": "bin"}, 'rows have columns input_ids, labels: write format="parquet"'),
        ({"compression": "zip"}, "compression. must be"),
        ({"bytes_per_file": 0}, "integer of 1 or more"),
        ({"executor": "process"}, r"must be tp.Threads\(n\), tp.Processes\(n\)"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path):
    pipe = RECIPES["sft"](parquet(tmp_path / "in"))
    with pytest.raises(tp.ConfigError, match=message):
        tokenize(pipe, tmp_path / "out", **options)


def test_no_rows_at_all_are_refused(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(tp.DataError, match="has no rows, and nothing is written"):
        tokenize(read(str(tmp_path / "empty.parquet")).tokenize("bytes"), tmp_path / "out")


@pytest.mark.parametrize("executor", [Threads(1), Threads(2), Processes(2)], ids=str)
def test_an_error_names_file_and_row(executor, tmp_path):
    for number in range(3):
        texts = [None if number == 2 and n == 25 else f"{n}" for n in range(40)]
        table = pa.table({"text": pa.array(texts, pa.string())})
        pq.write_table(table, tmp_path / f"t-{number}.parquet", row_group_size=10)
    pipe = read(f"{tmp_path}/t-*.parquet").tokenize("bytes")
    with pytest.raises(tp.DataError, match=r"t-2\.parquet, row group 2, row 25") as caught:
        tokenize(pipe, tmp_path / "out", executor=executor)
    assert (caught.value.row, caught.value.row_group) == (25, 2)
    left = {path.name for path in (tmp_path / "out").glob("[!_]*")}
    assert left <= {"part-00000.parquet", "part-00001.parquet"}


# The same call again


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        (words(), {}, r"stages/tokenize/tokenizer: saved .bytes., now"),
        ("bytes", {"bytes_per_file": 999}, r"with bytes_per_file: 268435456, now 999"),
    ],
    ids=["tokenizer", "options"],
)
def test_another_call_is_refused_with_the_first_difference(tokenizer, options, message, tmp_path):
    rows = read(parquet(tmp_path / "in"))
    tokenize(rows.tokenize("bytes", max_length=30), tmp_path / "out")
    pipe = rows.tokenize(tokenizer, max_length=30)
    with pytest.raises(tp.ConfigError, match=message):
        tokenize(pipe, tmp_path / "out", **options)
    done = tokenize(pipe, tmp_path / "out", overwrite=True, **options)
    done.verify()
    assert {Path(path).name for path in done.files} == {
        path.name for path in (tmp_path / "out").glob("*.parquet")
    }


@pytest.mark.parametrize("finished", [True, False])
def test_texts_that_were_changed_since_are_noticed(finished, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("aaa\n" * 9)
    pipe = tp.list_files(str(tmp_path / "*.txt")).read_text().tokenize("bytes")
    tokenize(pipe, tmp_path / "out")
    if not finished:
        begun_again(tmp_path / "out", 1)
    (tmp_path / "a.txt").write_text("bbb\n" * 9)
    os.utime(tmp_path / "a.txt", (1, 1))
    pipe = tp.list_files(str(tmp_path / "*.txt")).read_text().tokenize("bytes")
    with pytest.raises(tp.DataChangedError, match=r"the input was changed.*overwrite=True"):
        tokenize(pipe, tmp_path / "out")
    done = tokenize(pipe, tmp_path / "out", overwrite=True)
    assert next(iter(done.pipeline))["input_ids"][:3] == [*b"bbb"]


# What a recipe is asked for, and what was made


def test_a_recipe_refuses_files_that_are_not_finished(tmp_path):
    tokenize(RECIPES["sft"](parquet(tmp_path / "in")), tmp_path / "out")
    begun_again(tmp_path / "out", 2)
    with pytest.raises(tp.ConfigError, match="is not finished"):
        tp.recipe("sft", str(tmp_path / "out"), "bytes")


def test_a_recipe_refuses_files_that_were_made_otherwise(tmp_path):
    files = parquet(tmp_path / "in")
    done = tokenize(RECIPES["sft"](files), tmp_path / "out")
    for options, message in (
        (
            {"tokenizer": words()},
            r"sft\(tokenizer\): the files were tokenized with .bytes., and now",
        ),
        ({"tokenizer": "bytes"}, r"sft\(max_length\): .* with 30, and now it is 1024"),
    ):
        with pytest.raises(tp.ConfigError, match=message):
            tp.recipe("sft", done.folder, **options)
    with pytest.raises(tp.ConfigError, match=r"tokenized with labels=.*, for another recipe"):
        tp.recipe("seq2seq", done.folder, "bytes", max_length=30)
    with pytest.raises(
        tp.ConfigError, match=r"classification\(add_eos\): the files were tokenized"
    ):
        tp.recipe("classification", done.folder, "bytes", max_length=30)
    apart = tokenize(RECIPES["seq2seq"](files), tmp_path / "apart")
    with pytest.raises(tp.ConfigError, match="sft: the files were tokenized without labels"):
        tp.recipe("sft", apart.folder, "bytes", max_length=512)
    other = tokenize(RECIPES["pretrain"](files), tmp_path / "other")
    with pytest.raises(tp.ConfigError, match=r"pretrain\(add_eos\): .* with 256, and now it is 5"):
        tp.recipe("pretrain", other.folder, "bytes", add_eos=5)
    with pytest.raises(
        tp.ConfigError, match=r"pretrain: .* tokenized with max_length=30, for another"
    ):
        tp.recipe("pretrain", done.folder, "bytes")
    chats = tokenize(RECIPES["chat"](files), tmp_path / "chats")
    for recipe, ids, maker in (
        ("chat", done, "tokenize"), ("sft", chats, "chat_template"), ("pretrain", chats, "chat_template"),
    ):  # fmt: skip
        with pytest.raises(tp.ConfigError, match=rf"tokenized by {maker}\(\), for another recipe"):
            tp.recipe(recipe, ids.folder, small_tokenizer())
    with pytest.raises(
        tp.ConfigError, match=r"chat\(parse_arguments\): .*null, and now it is false"
    ):
        tp.recipe("chat", chats.folder, small_tokenizer(), parse_arguments=False)


@pytest.mark.parametrize(
    ("recipe", "options", "refused"),
    [
        ("sft", {"context": "", "max_length": 30}, "context"),
        ("seq2seq", {"context": ""}, "context"),
        ("chat", {"roles": {"me": "user"}}, "roles"),
        ("preference", {"roles": {"me": "user"}}, "roles"),
    ],
)
def test_options_that_have_shaped_the_ids_are_refused(recipe, options, refused, tmp_path):
    done = tokenize(RECIPES[recipe](parquet(tmp_path / "in")), tmp_path / "ids")
    tokenizer = small_tokenizer() if recipe == "chat" else "bytes"
    with pytest.raises(tp.ConfigError, match=rf"{recipe}\({refused}\) must be left out"):
        tp.recipe(recipe, done.folder, tokenizer, **options)


def test_files_of_texts_are_listed_no_more_often_than_before(tmp_path, monkeypatch):
    files = parquet(tmp_path / "in")
    opened = []
    read = FileSource.__init__

    def counted(self: FileSource, *args: Any, **options: Any) -> None:
        opened.append(self)
        read(self, *args, **options)

    monkeypatch.setattr(FileSource, "__init__", counted)
    tp.recipe("pretrain", files, "bytes")
    assert len(opened) == 1


def test_files_of_two_pipelines_are_not_mixed(tmp_path):
    files = parquet(tmp_path / "in")
    for name, eos in (("a", True), ("b", 257)):
        tokenize(tp.recipe("pretrain", files, "bytes", add_eos=eos), tmp_path / name)
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(tp.ConfigError, match="not tokenized by the same pipeline"):
        tp.recipe("pretrain", both, "bytes")


def test_columns_that_are_named_are_tokenized_whatever_else_there_is(tmp_path):
    table = pa.table({"text": ["a b", "c"], "input_ids": [[1, 2], [3]]})
    pq.write_table(table, tmp_path / "both.parquet")
    pipe = tp.recipe("masked_lm", str(tmp_path / "both.parquet"), words(), num_shards=1)
    assert [stage.name for stage in pipe.stages][2] == "tokenize"
