"""What was looked at prints as itself, and is plain data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes._internal.messages import Printed, Report, table
from trainpipes.look import inspect_files
from trainpipes.testing import shuffle_quality


def pipe() -> tp.Pipeline:
    rows = [{"x": n, "lang": "ab"[n % 2]} for n in range(60)]
    return tp.from_dataset(rows).sharding_filter(2).shuffle(12).batch(4)


def files(folder: Path) -> Any:
    pq.write_table(pa.table({"x": range(5), "text": ["a"] * 5}), folder / "rows.parquet")
    return inspect_files(folder)


REPORTS: dict[str, Callable[[Path], Any]] = {
    "explain": lambda folder: pipe().explain(),
    "stats": lambda folder: pipe().stats(labels="lang"),
    "shuffle": lambda folder: shuffle_quality(pipe()),
    "inspect": files,
    "profile": lambda folder: tp.profile(tp.Loader(pipe())),
    "show": lambda folder: pipe().show(1),
    "locate": lambda folder: tp.locate(pipe(), 1),
    "places": lambda folder: tp.locate(pipe(), 1).places,
    "find": lambda folder: tp.find(pipe(), [3, 5]),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_what_was_found_prints_where_it_is_shown(kind: str, tmp_path: Path) -> None:
    found = REPORTS[kind](tmp_path)
    assert isinstance(found, Printed)
    assert repr(found) == str(found) != ""


@pytest.mark.parametrize("kind", [*REPORTS][:4])
def test_what_was_found_is_json(kind: str, tmp_path: Path) -> None:
    found = REPORTS[kind](tmp_path)
    assert isinstance(found, Report)
    assert json.loads(json.dumps(found.to_dict()))


def test_rows_are_printed_as_a_table() -> None:
    class Pairs(Printed):
        def _rows(self) -> Any:
            yield "name", "a"
            yield "size", "3"

    assert str(Pairs()) == table([("name", "a"), ("size", "3")]) == "name  a\nsize  3"


def test_what_is_cached_and_who_tokenizes_are_lines_like_those_of_the_source(
    tmp_path: Path,
) -> None:
    rows = tp.from_arrow(pa.table({"text": ["a"] * 9})).tokenize("bytes", "text").cache(tmp_path)
    lines = rows.explain().lines
    said = [pair for stage in rows.stages for pair in stage._describe()]
    assert dict(lines)["cache"].startswith(str(tmp_path))
    assert [pair for pair in lines if pair[0] == "tokenizer"] == said
