"""Functions that several threads may call are called by those that work ahead, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.testing import check_resume

TABLE = pa.table({"x": range(200), "text": [f"row {n}" for n in range(200)]})


def rows() -> tp.Pipeline:
    return tp.from_arrow(TABLE).sharding_filter(4).shuffle(50, seed=3)


class Noting:
    """Notes which threads call it."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def note(self) -> None:
        self.threads.add(threading.current_thread().name)

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        self.note()
        return {"x": row["x"] * 2}

    def keep(self, row: dict[str, Any]) -> bool:
        self.note()
        return bool(row["x"] % 3)

    def several(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.note()
        return [row] * (row["x"] % 3)

    def columns(self, columns: dict[str, Any]) -> dict[str, Any]:
        self.note()
        return {"y": columns["x"] + 1}


CHAINS: dict[str, Callable[[Noting, dict[str, bool]], tp.Pipeline]] = {
    "map": lambda f, o: rows().map(f.row, version="1", **o).batch(8),
    "map of batches": lambda f, o: (
        rows().batch(8).map(lambda b: (f.note(), b)[1], version="1", **o)
    ),
    "filter": lambda f, o: rows().filter(f.keep, version="1", **o).batch(8),
    "flat_map": lambda f, o: rows().flat_map(f.several, version="1", **o).batch(8),
    "map_batches": lambda f, o: (
        rows().map_batches(f.columns, format="numpy", version="1", **o).batch(8).pad_collate()
    ),
    "with_columns": lambda f, o: (
        rows().with_columns(f.columns, format="numpy", version="1", **o).batch(8).collate()
    ),
}


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_other_threads_call_a_function_only_if_it_is_said_to_be_safe(name: str) -> None:
    mine, theirs = Noting(), Noting()
    alone = CHAINS[name](mine, {})
    shared = CHAINS[name](theirs, {"thread_safe": True})
    expected = list(tp.Loader(alone))
    assert mine.threads == {threading.current_thread().name}
    found = list(tp.Loader(shared, threads=2))
    for _ in range(200):  # the thread that iterates works, too, and may be first
        if theirs.threads - mine.threads:
            break
        list(tp.Loader(shared, threads=2))
    assert all(thread.startswith("trainpipes-") for thread in theirs.threads - mine.threads)
    assert theirs.threads - mine.threads
    assert repr(found) == repr(expected)
    assert alone.state_at(0) == shared.state_at(0)  # a state says nothing of threads


@pytest.mark.parametrize("name", ["map", "filter", "with_columns"])
def test_they_go_on_exactly(name: str) -> None:
    check_resume(lambda: CHAINS[name](Noting(), {"thread_safe": True}), every=7)


def test_a_function_that_fails_names_its_row_and_the_batches_before_it_come() -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == 100:
            raise LookupError("no such thing")
        return row

    pipe = tp.from_arrow(TABLE).map(fails, thread_safe=True).batch(10)
    got: list[Any] = []
    with pytest.raises(LookupError) as caught:
        got.extend(tp.Loader(pipe, threads=2))
    assert [row["x"] for batch in got for row in batch] == list(range(100))
    assert "row 100" in "".join(caught.value.__notes__)


def test_recipes_leave_no_work_to_the_thread_that_trains(tmp_path: Any) -> None:
    alpaca = tmp_path / "alpaca.jsonl"
    alpaca.write_text('{"instruction": "add", "input": "1 1", "output": "2"}\n' * 40)
    pipe = tp.recipe("sft", str(alpaca), tokenizer="bytes")
    assert not any(stage.runs_user_code for stage in pipe.stages)


@pytest.mark.parametrize("options", [{}, {"thread_safe": True}, {"num_workers": 2}])
def test_what_is_up_to_a_function_is_not_done_ahead_of_training(
    options: dict[str, Any], tmp_path: Any
) -> None:
    from trainpipes.prepare import tokenize

    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a b"}\n' * 20)
    pipe = tp.read_json(str(texts)).tokenize("bytes").map(dict, version="1", **options).batch(4)
    done = tokenize(pipe, tmp_path / "out")
    assert any("map(" in str(stage) for stage in done.pipeline.stages)
