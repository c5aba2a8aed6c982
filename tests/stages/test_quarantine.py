"""Quarantine: what is listed where, its limits, and each way in which rows of files are bad."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from bad_data import (
    FORMATS,
    GROUPED,
    ROWS,
    in_groups,
    json_lines,
    listed,
    numbers_of,
    parquet,
    write_files,
)
from every_stage import chat_tokenizer
from forked import Child
from interpreters import pid_of, python
from s3_store import s3_store

BAD = {3, 7, 21, 59}


def ids_of(pipe: Any) -> list[int]:
    return [int(row["id"]) for row in pipe]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_reader_lists_the_rows_that_it_leaves_out(kind: str, tmp_path: Path) -> None:
    files = write_files(tmp_path / "data", kind, 3, BAD)
    bad = in_groups(BAD) if kind in GROUPED else BAD
    read = FORMATS[kind][2]
    pipe = read(files, on_error=tp.Quarantine(tmp_path / "bad", max_share=1))
    kept = [n for n in range(60) if n not in bad]
    assert ids_of(pipe) == kept == ids_of(read(files, on_error="skip"))
    lines = listed(tmp_path / "bad")
    assert numbers_of(lines) == {(0, n) for n in bad}
    assert len(lines) == len(bad)
    assert {line["stage"] for line in lines} == {f"read_{'webdataset' if kind == 'tar' else kind}"}
    assert {*lines[0]} == {"epoch", "file", "block", "row", "source", "stage", "error", "value"}
    with pytest.raises(tp.DataError):
        ids_of(read(files))


@pytest.mark.parametrize("on_error", ["skip", "quarantine"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_of_which_no_row_can_be_read_is_named(
    on_error: str, workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = {
        "good": ['{"id": 1}'] * 300,
        "some": ['{"id": 1}', "{"] * 20,
        "none": ["{"] * 30,
        "only": ["{"],
    }
    for name, rows in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    how: Any = "skip" if on_error == "skip" else tp.Quarantine(tmp_path / "bad", max_share=0.2)
    pipe = tp.read_json(str(tmp_path / "*.jsonl"), on_error=how).sharding_filter(2).shuffle(50)
    loader = tp.Loader(pipe.batch(8), num_workers=workers)
    handler = logging.StreamHandler()  # of this process and its workers
    logging.getLogger("trainpipes").addHandler(handler)
    try:
        assert sum(map(len, loader)) == 320
    finally:
        logging.getLogger("trainpipes").removeHandler(handler)
    said = [line for line in capfd.readouterr().err.splitlines() if "such so far" in line]
    assert len(said) == 2  # once each, and no other file
    assert any("none.jsonl: none of its 30 rows can be read; left out" in line for line in said)
    assert any("only.jsonl: its only row cannot be read; left out" in line for line in said)


@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, 2) for kind in FORMATS), ("tar", 100), ("parquet", 100)]
)
def test_files_whose_rows_cannot_be_counted_are_left_out_as_a_whole(
    kind: str, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = write_files(tmp_path / "data", kind, 3, ())
    path = next((tmp_path / "data").glob("1.*"))
    content = b"\xff\xfea\0b\0" if kind in ("json", "csv") else path.read_bytes()
    if kind not in ("json", "csv"):
        content = content[: -size if kind in GROUPED else len(content) // size + 1]
    path.write_bytes(content)
    pipe = FORMATS[kind][2](files, on_error=tp.Quarantine(tmp_path / "bad"))
    assert ids_of(pipe) == [*range(ROWS), *range(2 * ROWS, 3 * ROWS)]
    assert "a file is left out" in caplog.text
    (line,) = listed(tmp_path / "bad")
    assert (line["file"], line["row"]) == (str(path), None)


def test_a_file_that_cannot_be_reached_stops_the_run(tmp_path: Path) -> None:
    files = write_files(tmp_path / "data", "json", 3, BAD)
    pipe = tp.read_json(files, on_error="skip").sharding_filter(3).batch(4)
    next(iter(pipe))
    (tmp_path / "data" / "2.jsonl").unlink()
    with pytest.raises(tp.MissingFilesError):
        list(pipe)
    loop = tmp_path / "data" / "1.jsonl"
    loop.unlink()
    loop.symlink_to(loop)
    with pytest.raises((tp.TrainpipesError, OSError)):
        list(tp.read_json(files, on_error="skip"))


@pytest.mark.parametrize(("size", "compressed"), [(1000, True), (5 << 20, False), (5 << 20, True)])
def test_rows_that_are_too_long_are_left_out(size: int, compressed: bool, tmp_path: Path) -> None:
    lines = [json.dumps({"id": n, "text": "x" * 10}) for n in range(50)]
    for n in (0, 20, 21, 49):
        lines[n] = json.dumps({"id": n, "text": "y" * size})
    path = tmp_path / ("rows.jsonl.gz" if compressed else "rows.jsonl")
    with fsspec.open(str(path), "wt", compression="infer") as file:
        file.write("\n".join(lines))
    with pytest.raises(tp.UnreadableError, match="line 1: a row here has more than 500 bytes"):
        ids_of(tp.read_json(path, max_row_bytes=500))
    for how in ({}, {"block_rows": 7}, {"infer": "all"}):
        folder = tmp_path / f"bad {how}"
        kept = tp.read_json(path, max_row_bytes=500, on_error=tp.Quarantine(folder), **how)
        assert ids_of(kept) == [n for n in range(50) if n not in (0, 20, 21, 49)]
        assert [line["row"] for line in listed(folder)] == [0, 20, 21, 49]
        assert all("max_row_bytes=500" in line["error"] for line in listed(folder))


def test_rows_of_other_types_are_bad_also_where_they_come_first(tmp_path: Path) -> None:
    lines = ['{"id": "first"}', *(json.dumps({"id": n}) for n in range(1, 9)), '{"id": [1]}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    pipe = tp.read_json(tmp_path / "rows.jsonl", on_error="skip")
    assert ids_of(pipe) == [*range(1, 9)]


def test_a_quoted_cell_without_an_end_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('id,text\n1,"a"\n2,"never ended\n3,b\n4,c\n')
    pipe = tp.read_csv(tmp_path / "rows.csv", on_error=tp.Quarantine(tmp_path / "bad"))
    assert ids_of(pipe) == [1]
    (line,) = listed(tmp_path / "bad")
    assert line["row"] == 1
    assert line["error"].startswith("a quoted cell has no end")


# Stages


def texts(folder: Path) -> str:
    rows = [{"id": n, "text": None if n in BAD else f"row {n}"} for n in range(60)]
    for number in range(3):
        table = pa.Table.from_pylist(rows[number * ROWS : (number + 1) * ROWS])
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=10)
    return str(folder / "*.parquet")


def test_null_texts_are_a_share_of_all_rows_so_far(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each run counts its nulls with its other rows, not before them."""
    column = [None if n % 20 == 0 else f"row {n}" for n in range(8000)]
    pq.write_table(pa.table({"text": column}), tmp_path / "t.parquet")
    rows = tp.read_parquet(tmp_path / "t.parquet")
    for on_error in ("skip", tp.Quarantine(tmp_path / "bad", max_share=0.06)):
        ids = rows.tokenize("bytes", on_error=on_error)
        assert len([*ids]) == 7600
        assert len([*ids.cache(tmp_path / "cache")]) == 7600
    shares = [re.search(r"([\d,]+) of ([\d,]+) rows? left out", said) for said in caplog.messages]
    assert any(shares)
    for lost, seen in (found.groups() for found in shares if found):
        assert int(lost.replace(",", "")) <= 0.06 * int(seen.replace(",", "")) + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stage_lists_its_rows_from_any_process(
    workers: int, tmp_path: Path, no_processes_left: None
) -> None:
    rows = tp.read_parquet(texts(tmp_path)).sharding_filter(4).shuffle(16)
    quarantine = tp.Quarantine(tmp_path / "bad")
    pipe = rows.tokenize("bytes", on_error=quarantine).batch(4)
    loader = tp.Loader(pipe, num_workers=workers)
    kept = [n for n in range(60) if n not in BAD]
    for epoch in range(2):
        assert sorted(row["id"] for batch in loader for row in batch) == kept
        lines = listed(tmp_path / "bad")
        assert numbers_of(lines) == {(e, n) for e in range(epoch + 1) for n in BAD}
    assert {(line["stage"], line["error"]) for line in lines} == {("tokenize", "a text is null")}
    assert {line["block"] for line in lines} <= {0, 1}


def talk(number: int, bad: bool) -> dict[str, Any]:
    roles = ("user", "user") if bad else ("user", "assistant")
    said = [{"role": role, "content": f"{role} {number}"} for role in roles]
    return {"id": number, "messages": said}


def pair(number: int, bad: bool) -> dict[str, Any]:
    return {"prompt": f"{number}?", "chosen": "" if bad else " yes", "rejected": " no"}


def of_recipe(name: str) -> Callable[[str, Any], tp.Pipeline]:
    return lambda path, on_error: tp.recipe(
        name, path, tokenizer=chat_tokenizer(), batch_size=4, drop_last=False, on_error=on_error
    )


FROM_FIRST_ROWS: dict[str, tuple[Any, Any]] = {
    "chat": (talk, of_recipe("chat")),
    "preference": (pair, of_recipe("preference")),
    "read_json": (
        lambda number, bad: {"id": number, "text": "x" * 500 if bad else "y"},
        lambda path, on_error: (
            tp.read_json(path, max_row_bytes=300, on_error=on_error).map(dict).tokenize("bytes")
            .batch(4).pad_collate()
        ),
    ),
    "tokenize": (
        lambda number, bad: {"id": number, "text": None if bad else "y"},
        lambda path, on_error: (
            tp.read_json(path).tokenize("bytes", on_error=on_error).map(dict).batch(4).pad_collate()
        ),
    ),
}  # fmt: skip


def of_first_rows(kind: str, folder: Path) -> tp.Pipeline:
    """Of 200 rows, of which 4 are bad."""
    make_row, make_pipe = FROM_FIRST_ROWS[kind]
    rows = (json.dumps(make_row(n, bad=n % 50 == 7)) + "\n" for n in range(200))
    (folder / "rows.jsonl").write_text("".join(rows))
    pipe: tp.Pipeline = make_pipe(str(folder / "rows.jsonl"), tp.Quarantine(folder / "bad"))
    return pipe


@pytest.mark.parametrize("kind", FROM_FIRST_ROWS)
def test_rows_by_which_types_are_found_are_counted_and_listed_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = of_first_rows(kind, tmp_path)
    batches = list(tp.Loader(pipe, epoch=0))
    assert sum(len(next(iter(batch.values()))) for batch in batches) == 196
    lines = listed(tmp_path / "bad")
    assert [line["row"] for line in sorted(lines, key=lambda line: line["row"])] == [
        *range(7, 200, 50)
    ]
    assert "4 of 200 rows left out" in caplog.text


@pytest.mark.parametrize("kind", FROM_FIRST_ROWS)
def test_rows_that_are_looked_at_are_counted_and_listed_in_their_turn_only(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = of_first_rows(kind, tmp_path)
    loader = tp.Loader(pipe)
    loader.peek(), pipe.peek(), loader.show(2), pipe.show(5)
    said = str(pipe.stats(300))
    assert "4 of 200" in said
    assert "listed in" not in said
    (
        loader.estimate_len(),
        pipe.state_at(9),
        tp.locate(pipe, 7),
        tp.find(pipe, [(str(tmp_path / "rows.jsonl"), 20)]),
    )
    assert not caplog.text
    assert not (tmp_path / "bad").exists()
    taken = iter(loader)
    next(taken)
    loader.peek(), pipe.show(2), tp.locate(loader, 3)
    for _ in taken:
        pass
    assert {line["row"] for line in listed(tmp_path / "bad")} == {*range(7, 200, 50)}
    assert len(listed(tmp_path / "bad")) == 4
    assert "4 of 200 rows left out" in caplog.text


def test_a_run_goes_from_skip_to_a_quarantine_and_back(tmp_path: Path) -> None:
    rows = tp.read_parquet(texts(tmp_path)).sharding_filter(4).shuffle(16)

    def pipe(on_error: Any) -> tp.Pipeline:
        return rows.tokenize("bytes", on_error=on_error).batch(4)

    expected = list(pipe("skip"))
    first = pipe("skip")
    found = list(islice(first, 4))
    for on_error in (tp.Quarantine(tmp_path / "bad"), "skip"):
        then = pipe(on_error)
        then.load_state_dict(first.state_dict())
        found += list(islice(then, 3))
        first = then
    assert found == expected[:10]


def test_stats_say_all_that_a_stage_has_counted(tmp_path: Path) -> None:
    files = {name: write_files(tmp_path / name, "json", 1, BAD) for name in "ab"}
    read = {n: tp.read_json(f, max_row_bytes=300, on_error="skip") for n, f in files.items()}
    pipe = tp.mix(read, weights={"a": 1, "b": 1}).batch(100)
    assert pipe.stats().counts["read_json"].count(" rows left out: ") == 2
    rows = tp.from_arrow(pa.table({"text": ["long enough", None, "a"]}))
    counted = rows.tokenize("bytes", max_length=5, on_error="skip").batch(2).stats().counts
    assert "1 of 3 rows left out" in counted["tokenize"]
    assert "1 of 2 texts cut to max_length=5 (6 tokens)" in counted["tokenize"]


def test_no_more_than_max_rows_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write_files(tmp_path / "data", "json", 3, BAD)
    pipe = tp.read_json(files, on_error=tp.Quarantine(tmp_path / "bad", max_rows=2))
    assert len(ids_of(pipe)) == 56
    assert len(listed(tmp_path / "bad")) == 2
    assert "listed max_rows = 2 rows" in caplog.text
    assert "4 of 60 rows left out" in str(pipe.explain())


def test_more_bad_rows_than_max_share_stop_the_run_with_a_summary(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(json_lines(range(1200), range(500, 1000)))
    quarantine = tp.Quarantine(tmp_path / "bad", max_share=0.25)
    pipe = tp.read_json(folder / "rows.jsonl", max_row_bytes=300, on_error=quarantine).batch(10)
    with pytest.raises(tp.DataError) as caught:
        list(tp.mix({"web": pipe}, weights={"web": 1}))
    said = str(caught.value)
    assert "source 'web' of a mix" in said
    assert "rows of this process are left out, more than max_share=0.25" in said
    assert "x read_json(on_error): Invalid encoding in string" in said
    assert said.count("rows.jsonl, row ") == 10
    assert str(tmp_path / "bad") in said


@pytest.mark.parametrize("store", ["memory", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_quarantine_may_be_at_a_url_in_objects_of_some_size(store: str, tmp_path: Path) -> None:
    lines = (f'{{"id": {n}{"}" * (n % 2)}\n' for n in range(800))
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    with s3_store("quarantine") if store == "s3" else nullcontext({"key": "hush"}) as options:
        folder = f"{store}://quarantine/{tmp_path.name}"
        quarantine = tp.Quarantine(folder, max_share=1, storage_options=options)
        pipe = tp.read_json(tmp_path / "rows.jsonl", block_rows=100, on_error=quarantine)
        assert ids_of(pipe.batch(50).map(lambda rows: rows[0])) == [*range(1, 800, 100)]
        if store == "s3":
            lost = tp.Quarantine("s3://no-such-bucket/x", storage_options=options)
            with pytest.raises((tp.TrainpipesError, OSError), match="no-such-bucket"):
                ids_of(tp.read_json(tmp_path / "rows.jsonl", on_error=lost))
        system = fsspec.filesystem(store, **options)
        system.invalidate_cache()
        objects = sorted(system.ls(folder, detail=False))
        found = [json.loads(one) for path in objects for one in system.cat(path).splitlines()]
        system.rm(folder, recursive=True)
    assert 1 < len(objects) < 8  # blocks
    assert [line["row"] for line in found] == [*range(0, 800, 2)]
    assert "hush" not in json.dumps([found, objects])


def test_a_store_that_is_gone_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", gone)
    quarantine = tp.Quarantine("memory://gone", retry=tp.Retry(max_attempts=2, deadline=9))
    rows = tp.from_dataset([{"id": 0}, {"id": 1}]).map(
        lambda row: 1 / row["id"], on_error=quarantine
    )
    with pytest.raises(tp.UnreachableError) as caught:
        list(rows)
    said = "from the last checkpoint if there is one, or try more than 2 by Quarantine(..., retry=tp.Retry("
    assert said in caught.value.message


def test_a_full_disk_stops_the_run_and_leaves_whole_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1\n' * 400 + '{"id": 1}\n')
    quarantine = tp.Quarantine(tmp_path / "bad", max_share=1)
    options: Any = {"block_rows": 50, "index": False, "on_error": quarantine}

    def child(say: Callable[[Any], None]) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(tp.ConfigError) as caught:
            list(tp.read_json(tmp_path / "rows.jsonl", **options))
        say(str(caught.value))

    with Child(child) as process:
        said = process.hear()
    assert re.match(r"Quarantine\(\): .*/bad/.* cannot be written: ", said)
    assert 0 < len(listed(tmp_path / "bad")) < 400


@pytest.mark.parametrize(("bad", "stops"), [(100, False), (101, True)])
def test_max_share_itself_is_allowed(bad: int, stops: bool, tmp_path: Path) -> None:
    lines = ['{"id": 1}\n'] * (1000 - bad) + ['{"id": 1\n'] * bad
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    pipe = tp.read_json(tmp_path / "rows.jsonl", on_error=tp.Quarantine(tmp_path / "bad"))
    with pytest.raises(tp.DataError, match="101 of 1,000") if stops else nullcontext():
        assert len(ids_of(pipe)) == 1000 - bad


def test_too_many_bad_rows_in_a_worker_end_it(tmp_path: Path, no_processes_left: None) -> None:
    (tmp_path / "rows.jsonl").write_text(('{"id": 1}\n' * 9 + '{"id": 1\n') * 200)
    quarantine = tp.Quarantine(tmp_path / "bad", max_share=0.001)
    pipe = tp.read_json(tmp_path / "rows.jsonl", block_rows=100, on_error=quarantine)
    loader = tp.Loader(pipe.sharding_filter(2).shuffle(50).batch(4), num_workers=2)
    with pytest.raises(tp.DataError, match=r"more than max_share=0\.001"):
        list(loader)


def test_workers_that_are_not_forked_from_here_write_files_of_their_own(
    tmp_path: Path, no_processes_left: None
) -> None:
    rows = tp.read_parquet(texts(tmp_path)).map(
        refuse_bad, on_error=tp.Quarantine(tmp_path / "bad")
    )
    ids_of(rows)  # a file of this process, too
    pipe = rows.sharding_filter(4).shuffle(8).batch(4)
    loader = tp.Loader(pipe, num_workers=2, multiprocessing_context="forkserver")
    kept = [n for n in range(60) if n not in BAD]
    assert sorted(row["id"] for batch in loader for row in batch) == kept
    assert len(listed(tmp_path / "bad")) == 2 * len(BAD)
    names = [one.name.split("-")[-4:-1] for one in (tmp_path / "bad").iterdir()]
    own = [pid for pid, *_ in names if pid == str(os.getpid())]
    assert len(own) == 1 < len(names)
    assert {worker for *_, worker in names} <= {"0", "1"}


def refuse_bad(row: Any) -> Any:
    if row["id"] in BAD:
        raise ValueError("a bad row")
    return row


@pytest.mark.parametrize("workers", [0, 2])
def test_lines_and_logs_name_the_source_of_a_mix(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, no_processes_left: None
) -> None:
    quarantine, read = tp.Quarantine(tmp_path / "bad", max_share=1), {}
    for name in "abc":
        files = write_files(tmp_path / name, "json", 1, BAD)
        (tmp_path / name / "cut.jsonl.gz").write_bytes(b"not gzip")
        read[name] = tp.read_json([files, str(tmp_path / name / "*.gz")], on_error=quarantine)
    inner = tp.mix({"x": read["a"], "y": read["b"]}, weights={"x": 1, "y": 1})
    mix = tp.mix({"inner": inner, "c": read["c"]}, weights={"inner": 2, "c": 1})
    pipe = mix.sharding_filter(2).batch(4)
    whole = list(tp.Loader(pipe, num_workers=workers))
    lines = listed(tmp_path / "bad")
    found = {(one["source"], Path(one["file"]).parent.name, one["row"]) for one in lines}
    sources = [("inner/x", "a"), ("inner/y", "b"), ("c", "c")]
    assert found == {(*one, row) for one in sources for row in (3, 7, None)}
    for source, folder in sources:
        place = f"source {source!r}, {tmp_path / folder}"
        assert f"epoch 0: read_json(on_error): source {source!r}: " in caplog.text
        assert f"left out, which cannot be read: {place}" in caplog.text
        assert workers or f"the last one at {place}" in caplog.text
    assert "source 'inner/x': " in pipe.stats(2).counts["read_json"]
    half = iter(tp.Loader(pipe, epoch=0, num_workers=workers))
    assert list(islice(half, 3)) == whole[:3]
    again = tp.Loader(tp.Pipeline(pipe.stages))
    again.load_state_dict(half.state_dict())
    assert list(again) == whole[3:]


@pytest.mark.parametrize("order", [("raise", "skip"), ("skip", "raise")])
def test_a_state_of_raise_does_not_fit_a_run_that_leaves_rows_out(
    order: tuple[Any, Any], tmp_path: Path
) -> None:
    files = write_files(tmp_path / "data", "json", 3, ())
    first, then = (tp.read_json(files, on_error=one).shuffle(8).batch(2) for one in order)
    next(iter(first))
    with pytest.raises(tp.StateError, match=r"read_json\(on_error\)"):
        then.load_state_dict(first.state_dict())


@pytest.mark.parametrize("where", ["data", "data/*.jsonl"])
def test_a_quarantine_beside_the_data_is_no_data(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path / "data", "json", 3, BAD)

    def pipe() -> tp.Pipeline:
        quarantine = tp.Quarantine(tmp_path / "data", max_share=1)
        return tp.read_json(tmp_path / where, max_row_bytes=300, on_error=quarantine).batch(4)

    first = pipe()
    found = list(islice(first, 5))
    assert "beside the data" not in caplog.text
    then = pipe()
    then.load_state_dict(first.state_dict())
    found += list(then)
    assert caplog.text.count("1 files beside the data list rows of a Quarantine") == 1
    assert [row["id"] for batch in found for row in batch] == [n for n in range(60) if n not in BAD]
    lists = [*map(str, (tmp_path / "data").glob("quarantine-*"))]
    assert {row["stage"] for row in tp.read_json(lists)} == {"read_json"}  # to look at them


def test_each_document_of_a_packed_row_is_listed(tmp_path: Path) -> None:
    labels = [[-100] * 3 if n % 4 < 2 else [1, 2, 3] for n in range(16)]
    rows = tp.from_arrow(pa.table({"input_ids": [[1, 2, 3]] * 16, "labels": labels}))
    quarantine = tp.Quarantine(tmp_path / "bad", max_share=1)
    assert len(list(rows.pack(6, on_error=quarantine))) == 4
    assert sorted(line["row"] for line in listed(tmp_path / "bad")) == [0, 1, 4, 5, 8, 9, 12, 13]


class Odd(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("repr")

    __str__ = __repr__


@pytest.mark.parametrize(
    "value",
    [b"\xff", float("nan"), 10**5000, torch.zeros(2), np.arange(3), "\ud800", Odd(), {1: Odd()}],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_does_not_hold_are_listed_as_text(value: Any, tmp_path: Path) -> None:
    rows = [{"text": None if n % 2 else "a", "value": value} for n in range(4)]
    pipe = tp.from_dataset(rows).tokenize("bytes", on_error=tp.Quarantine(tmp_path / "bad"))
    assert len(list(pipe)) == 2
    (file,) = (tmp_path / "bad").iterdir()
    found = [(row["row"], row["value"][:14]) for row in tp.read_json(file)]
    assert found == [(n, "{'text': None,") for n in (1, 3)]


def test_a_bad_line_is_listed_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a":1}\n  {"a":2},\r\n{"a":3}\n')
    bad = tp.Quarantine(tmp_path / "bad")
    assert list(tp.read_json(tmp_path / "a.jsonl", on_error=bad)) == [{"a": 1}, {"a": 3}]
    (file,) = (tmp_path / "bad").iterdir()
    assert [row["value"] for row in tp.read_json(file)] == ['{"a":2},']


def test_rows_of_flat_map_are_listed_by_the_row_that_they_are_made_of(tmp_path: Path) -> None:
    rows = tp.from_dataset([{"text": "a"}, {"text": None}])
    pipe = rows.flat_map(lambda row: [row, {"text": None}])
    assert len(list(pipe.tokenize("bytes", on_error=tp.Quarantine(tmp_path / "bad")))) == 1
    assert [line["row"] for line in listed(tmp_path / "bad")] == [0, 1, 1]


def test_stages_after_joined_sources_list_their_rows(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    rows = [tp.read_parquet(texts(tmp_path / name)) for name in "ab"]
    pipe = tp.concat(rows).tokenize("bytes", on_error=tp.Quarantine(tmp_path / "bad"))
    assert len(list(pipe)) == 2 * (60 - len(BAD))
    found = {(line["file"], line["row"]) for line in listed(tmp_path / "bad")}
    files = [str(tmp_path / name / f"{n // ROWS}.parquet") for name in "ab" for n in BAD]
    assert found == {(file, n % ROWS) for file, n in zip(files, [*BAD] * 2, strict=True)}


def test_secrets_in_urls_are_hidden(tmp_path: Path) -> None:
    rows = [{"text": None, "url": "https://me:hush@host/x?token=hush"}, {"text": "a", "url": ""}]
    pipe = tp.from_arrow(pa.Table.from_pylist(rows))
    list(pipe.tokenize("bytes", on_error=tp.Quarantine(tmp_path / "bad")))
    (line,) = listed(tmp_path / "bad")
    assert "host" in line["value"]
    assert "hush" not in line["value"]
    assert "hush" not in repr(tp.Quarantine("x", storage_options={"key": "hush"}))
    assert "hush" not in repr(tp.Quarantine("s3://me:hush@bucket/x?sig=hush"))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("folder", "", "must be a path or URL"),
        ("folder", "a\0b", "must be a path or URL"),
        ("max_rows", -1, "must be"),
        ("storage_options", 3, "must be a dict"),
        ("max_share", 2, "must be a number from 0 to 1"),
    ],
)
def test_bad_options_are_refused(option: str, value: Any, said: str) -> None:
    with pytest.raises(tp.ConfigError, match=rf"Quarantine\({option}\) {said}"):
        tp.Quarantine(**{"folder": "x", option: value})
    with pytest.raises(tp.ConfigError, match=r'on_error\) must be "raise" or "skip"'):
        tp.read_json("x", on_error="keep")


def test_a_config_names_a_quarantine(tmp_path: Path) -> None:
    text = f"""
stages:
  - read_json: {{files: {tmp_path}/x.jsonl, on_error: {{quarantine: {tmp_path}/bad}}}}
  - tokenize:
      tokenizer: bytes
      on_error: {{quarantine: {{folder: {tmp_path}/bad, max_rows: 5}}}}
"""
    (tmp_path / "a.yaml").write_text(text)
    pipe = tp.load(tmp_path / "a.yaml")
    assert pipe.stages[1].options["on_error"] == tp.Quarantine(f"{tmp_path}/bad")
    assert pipe.stages[2].options["on_error"] == tp.Quarantine(f"{tmp_path}/bad", max_rows=5)
    pipe.to_yaml(tmp_path / "b.yaml")
    assert tp.load(tmp_path / "b.yaml") == pipe
    remote = text.replace(f"{tmp_path}/bad", "memory://bad")
    (tmp_path / "c.yaml").write_text(remote)
    given = {"key": "hush"}
    for stage in tp.load(tmp_path / "c.yaml", storage_options=given).stages[1:]:
        assert stage.options["on_error"].storage_options == given
    odd = text.replace("max_rows: 5", "storage_options: {key: hush}")
    (tmp_path / "d.yaml").write_text(odd)
    said = "mapping there with folder, max_rows, max_share"
    with pytest.raises(tp.ConfigError, match=said) as no:
        tp.load(tmp_path / "d.yaml")
    assert "hush" not in str(no.value)
    (tmp_path / "a.yaml").write_text(text.replace("quarantine:", "quarantined:"))
    with pytest.raises(tp.ConfigError, match="on_error must be a word, or"):
        tp.load(tmp_path / "a.yaml")


# Processes

TRAIN = """
import sys, torch, trainpipes as tp
folder, state, slow = sys.argv[1:]
import pathlib, time
rows = tp.read_json(folder + "/data/*.jsonl", max_row_bytes=300,
                    on_error=tp.Quarantine(folder + "/bad", max_share=1))
pipe = rows.sharding_filter(4).shuffle(8).batch(2)
if pathlib.Path(state).exists():
    pipe.load_state_dict(torch.load(state))
given = open(folder + "/given", "a")
for batch in pipe:
    torch.save(pipe.state_dict(), state + ".new")
    pathlib.Path(state + ".new").rename(state)
    print(*(row["id"] for row in batch), file=given, flush=True)
    time.sleep(float(slow))
"""


def test_a_killed_run_goes_on_and_each_line_is_whole(tmp_path: Path) -> None:
    write_files(tmp_path / "data", "json", 3, BAD)
    command = [*python(), "-c", TRAIN, str(tmp_path), str(tmp_path / "state.pt")]
    first = subprocess.Popen([*command, "0.1"])
    given = tmp_path / "given"
    end = time.monotonic() + 60
    while time.monotonic() < end and (not given.exists() or given.read_text().count("\n") < 5):
        time.sleep(0.02)
    os.kill(pid_of(first), signal.SIGKILL)
    first.wait()
    at = given.read_text().count("\n")
    subprocess.run([*command, "0"], check=True, timeout=100)
    lines = given.read_text().split("\n")
    lost = {int(n) for n in lines[at].split()}
    assert {int(n) for n in " ".join(lines).split()} >= {*range(60)} - BAD - lost
    assert numbers_of(listed(tmp_path / "bad")) == {(0, n) for n in BAD}
    assert len(list((tmp_path / "bad").iterdir())) == 2


def test_parquet_that_says_nothing_of_its_damage_is_read_as_before(tmp_path: Path) -> None:
    (tmp_path / "0.parquet").write_bytes(parquet(range(20), ()))
    path = tmp_path / "0.parquet"
    assert ids_of(tp.read_parquet(path, on_error="skip")) == [*range(20)]
    kept = tp.read_parquet(path, on_error="skip", filter=[["id", ">", 7]])
    assert ids_of(kept) == [*range(8, 20)]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_stops_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    pipe = tp.read_json(
        write_files(tmp_path / "data", "json", 1, BAD), on_error=tp.Quarantine(tmp_path / name)
    )
    with pytest.raises(tp.ConfigError, match=f"{name}.* cannot be written"):
        ids_of(pipe)


def many(folder: Path, bad: Callable[[int], bool], rows: int) -> str:
    lines = ("{" if bad(n) else f'{{"x": {n}}}' for n in range(rows))
    (folder / "many.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "many.jsonl")


@pytest.mark.parametrize("first", [1, 16, 72])
def test_skip_does_not_leave_out_most_rows(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.interfaces.quarantine.LEAST_ROWS", 10)
    path = many(tmp_path, lambda n: n >= first, 120)
    pipe = tp.read_json(path, on_error="skip", block_rows=20)
    if first == 72:
        assert len(list(pipe)) == first
        return
    with pytest.raises(
        tp.DataError, match=r"read_json\(on_error\): [\d,]+ of [\d,]+ rows .* are left out"
    ):
        list(pipe)
    rows = tp.read_json(path, on_error=tp.Quarantine(tmp_path / "bad", max_rows=1, max_share=1))
    assert len(list(rows)) == first


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("threads", [0, 2])
def test_skip_does_not_leave_out_all_rows_of_a_pass(
    rows: int, threads: int, tmp_path: Path
) -> None:
    path = many(tmp_path, lambda n: n >= 0, rows)
    pipe = tp.from_dataset([{"bytes": b"no picture"}] * rows).decode_image(on_error="skip")
    said = f"{rows} of {rows} rows of this process are left out"
    for one in (pipe, tp.read_json(path, on_error="skip", schema=pa.schema({"x": "int64"}))):
        with pytest.raises(tp.DataError, match=said):
            list(tp.Loader(one.shuffle(5).batch(2), threads=threads))


def test_a_row_that_cannot_be_shown_is_left_out_all_the_same(tmp_path: Path) -> None:
    day = pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32())  # which Python has no date for
    table = pa.table({"text": ["a", None], "day": day})
    pipe = tp.from_arrow(table).tokenize(
        "bytes", on_error=tp.Quarantine(tmp_path / "bad", max_share=1)
    )
    assert len(list(pipe.select("input_ids"))) == 1
    (line,) = listed(tmp_path / "bad")
    assert line["value"].startswith("a row that cannot be shown: ")
