"""on_error of stages that call functions: rows of which one raises are left out, counted and listed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import trainpipes as tp
from bad_data import listed
from resuming import check_resume

BAD = {0, 3, 7, 21, 38, 39, 59}
KEPT = [n for n in range(60) if n not in BAD]


class BadRowError(ValueError):
    """What the functions raise."""


def value_of(x: int) -> int:
    if x in BAD:
        raise BadRowError(f"no picture: {x}")
    return x


def one(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": value_of(row["x"])}


def drawn(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": value_of(row["x"]), "noise": rng.random()}


def holds(row: dict[str, Any]) -> bool:
    return value_of(row["x"]) >= 0


def several(row: dict[str, Any]) -> Any:
    yield {"x": row["x"]}
    yield {"x": value_of(row["x"])}


def at_once(columns: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.stack([value_of(x) for x in columns["x"].tolist()])}


def beside(table: pa.Table) -> dict[str, Any]:
    return {"y": [str(value_of(x)) for x in table.column("x").to_pylist()]}


def rows(count: int = 60) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": range(count)}))


Add = Callable[[tp.Pipeline, Any], tp.Pipeline]
STAGES: dict[str, Add] = {
    "map": lambda rows, how: rows.map(one, on_error=how),
    "map in threads": lambda rows, how: rows.map(one, num_workers=2, on_error=how),
    "map with rng": lambda rows, how: rows.map(drawn, rng=True, on_error=how),
    "filter": lambda rows, how: rows.filter(holds, on_error=how),
    "flat_map": lambda rows, how: rows.flat_map(several, on_error=how),
    "map_batches": lambda rows, how: rows.map_batches(at_once, format="numpy", on_error=how),
    "with_columns": lambda rows, how: rows.with_columns(beside, on_error=how),
}
#: flat_map stands after the shuffle.
BEFORE = [name for name in STAGES if name != "flat_map"]


def xs(pipe: Any) -> list[int]:
    return [row["x"] for batch in pipe for row in batch]


@pytest.mark.parametrize("kind", STAGES)
def test_all_rows_are_counted_and_not_those_beside_bad_ones_alone(kind: str) -> None:
    pipe = STAGES[kind](rows(5000).sharding_filter(4), "skip").batch(8)
    assert len(xs(pipe)) >= 4900
    assert f"{len(BAD)} of 5,000 rows left out" in str(pipe.explain())


@pytest.mark.parametrize("workers", [0, 2])
def test_explain_counts_rows_of_the_sources_of_a_mix(workers: int) -> None:
    parts = {name: rows().shuffle(9).map(one, on_error="skip") for name in ("a", "b")}
    loader = tp.Loader(tp.mix(parts, weights={"a": 1, "b": 1}).batch(4), num_workers=workers)
    list(loader)
    counted = [said for name, said in loader.explain().lines if name == "map"]
    for name, said in zip("ab", counted, strict=True):  # it reads some rows ahead
        assert re.fullmatch(rf"source '{name}': \d+ of \d+ rows left out: .*", said)


def test_stats_count_rows_of_all_batches_that_they_look_at(tmp_path: Path) -> None:
    pipe = rows().map(one, on_error=tp.Quarantine(tmp_path / "bad", max_share=1)).batch(4)
    said = f"{len(BAD)} of 60 rows left out"
    assert pipe.stats().counts["map"].startswith(said)
    assert pipe.stats().batches == 0, "none has a mask"
    padded = pipe.map(lambda batch: [{"input_ids": [row["x"]]} for row in batch]).pad_collate()
    assert padded.stats().counts["map"].startswith(said)


def test_writers_log_how_many_rows_are_left_out_of_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = rows(500).map(one, on_error="skip")
    pipe.write_parquet(tmp_path / "files", rows_per_file=100)
    (said,) = [text for text in caplog.messages if "of 500 rows" in text]
    assert said.startswith("write_parquet(): map(")
    assert f"{len(BAD)} of 500 rows left out: the function raised" in said
    pipe.to_map_dataset(tmp_path / "rows.map")
    assert f"{len(BAD)} of 500 rows" in caplog.messages[-1]


@pytest.mark.parametrize("kind", STAGES)
def test_rows_of_which_the_function_raises_are_left_out_and_listed(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add, folder = STAGES[kind], tmp_path / "bad"
    expected = sorted(KEPT * (2 if kind == "flat_map" else 1))
    pipe = add(rows(), tp.Quarantine(folder, max_share=1)).batch(4)
    assert sorted(xs(pipe)) == expected
    assert sorted(xs(add(rows(), "skip").batch(4))) == expected
    lines = listed(folder)
    assert len(lines) == len(BAD), "each is listed once, though types are found from first rows"
    assert {(line["epoch"], line["row"]) for line in lines} == {(0, n) for n in BAD}
    name = kind.split()[0]
    assert {line["stage"] for line in lines} == {name}
    assert lines[0]["error"].startswith("BadRowError: no picture: ")
    assert json.loads(lines[0]["value"].replace("'", '"')) == {"x": lines[0]["row"]}
    assert f"{len(BAD)} of 60 rows left out: the function raised" in caplog.text
    with pytest.raises(TypeError, match="len"):
        len(pipe)
    with pytest.raises(BadRowError) as caught:
        list(add(rows(), "raise"))
    assert f"raised in {name}" in caught.value.__notes__[0]
    assert "at row 0" in caught.value.__notes__[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", STAGES)
def test_resumes_are_exact(kind: str) -> None:
    add = STAGES[kind]
    check_resume(
        add(rows().sharding_filter(4).shuffle(9, seed=1), "skip").batch(3), epochs=2, processes=0
    )
    if kind in BEFORE:
        before = add(rows(), "skip").sharding_filter(4).shuffle(9, seed=1).batch(3)
        check_resume(before, epochs=2, processes=0)


def test_draws_of_rows_that_come_are_those_without_bad_rows() -> None:
    def plain(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": row["x"], "noise": rng.random()}

    whole = {row["x"]: row for row in rows().map(plain, rng=True, version="1")}
    some = rows().map(drawn, rng=True, version="1", on_error="skip")
    assert list(some) == [whole[n] for n in KEPT]


def test_processes_leave_rows_out_too(no_processes_left: None) -> None:
    pipe = rows().map(one, num_workers=2, method="process", on_error="skip")
    assert [row["x"] for row in pipe] == KEPT
    loader = tp.Loader(rows().map(one, on_error="skip").batch(4), num_workers=1)
    assert sorted(xs(loader)) == KEPT


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("error", [ConnectionError, TimeoutError, ImportError, MemoryError])
def test_what_is_not_about_a_row_stops_the_run(kind: str, error: type[Exception]) -> None:
    def fails(*_: Any) -> Any:
        raise error("not the row's fault")

    name, *more = kind.split()
    options: Any = {"num_workers": 2} if "threads" in more else {"rng": True} if more else {}
    pipe = getattr(rows(), name)(fails, on_error="skip", **options)
    with pytest.raises(error, match="not the row's fault"):
        list(pipe)


@pytest.mark.parametrize("kind", STAGES)
def test_what_a_function_must_not_return_is_an_error_with_skip_too(kind: str) -> None:
    name = kind.split()[0]
    if name == "filter":
        return
    with pytest.raises(tp.TrainpipesError):
        list(getattr(rows(), name)(lambda _: None, on_error="skip"))


def test_a_function_that_fails_for_rows_together_only_stops_the_run() -> None:
    def fails(columns: Any) -> Any:
        if len(columns["x"]) > 1:
            raise ValueError("never more than one")
        return columns

    with pytest.raises(ValueError, match="never more than one"):
        list(rows().map_batches(fails, format="numpy", on_error="skip"))


def test_batches_are_not_left_out() -> None:
    for kind, add in STAGES.items():
        if kind == "flat_map":
            continue
        with pytest.raises(tp.ConfigError, match=r"by its on_error: put it before batch\(\)"):
            list(add(rows().batch(4), "skip"))
    ids = tp.from_dataset([{"input_ids": [1, 2], "labels": [1, 2]}] * 4).batch(2)
    with pytest.raises(tp.ConfigError, match=r"by its on_error: put it before batch\(\)"):
        list(ids.tokenized_by("bytes", on_error="skip"))


def test_an_expression_has_no_on_error() -> None:
    with pytest.raises(tp.ConfigError, match=r'must be "raise" beside an expression'):
        rows().filter(pc.field("x") > 1, on_error="skip")


def test_a_state_says_whether_rows_are_left_out() -> None:
    first = rows().map(one, on_error="skip").batch(2)
    next(iter(first))
    with pytest.raises(tp.StateError, match="on_error"):
        rows().map(one).batch(2).load_state_dict(first.state_dict())
