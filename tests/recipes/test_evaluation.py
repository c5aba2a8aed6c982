"""``evaluation`` gives every row once, in file order, with its number, on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from elastic.launch import Launch
from trainpipes.testing import check_resume
from trainpipes_recipes import evaluate, evaluation, sft, train_sft

#: Made rows: sums of several lengths.
ROWS = [
    {"prompt": f"{k} + {k} =" + " hm" * (k % 4), "response": f" {2 * k}", "id": f"r{k}"}
    for k in range(53)
]
TEXTS = [row["prompt"] for row in ROWS]


def files(kind: str, folder: Path) -> Any:
    """The rows in two files, whose names are in order."""
    folder.mkdir(exist_ok=True)
    for number, part in enumerate([ROWS[:20], ROWS[20:]]):
        table, path = pa.Table.from_pylist(part), folder / f"{number}.{kind}"
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=7)
        elif kind == "csv":
            pyarrow.csv.write_csv(table, path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder / f"*.{kind}"


SOURCES: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda f: files("parquet", f),
    "jsonl": lambda f: files("jsonl", f),
    "csv": lambda f: files("csv", f),
    "from_dataset": lambda f: tp.from_dataset(ROWS),
    "from_iterable": lambda f: tp.from_iterable(lambda: ROWS),
    "concat": lambda f: tp.concat(tp.from_dataset(ROWS[:9]), tp.from_dataset(ROWS[9:])),
}


def read(batches: Iterator[Any]) -> list[tuple[int, str]]:
    """Numbers and texts of rows."""
    return [
        (row, bytes(i for i in ids if i < 256).decode())
        for batch in batches
        for row, ids in zip(batch["row"].tolist(), batch["input_ids"].tolist(), strict=True)
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_each_kind_of_source_gives_every_row_in_order(name: str, tmp_path: Path) -> None:
    pipe = evaluation(SOURCES[name](tmp_path), "bytes", text="prompt", batch_size=8, num_shards=12)
    for _ in range(2):
        assert read(iter(pipe)) == list(enumerate(TEXTS))
    check_resume(pipe, every=3)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("workers", [None, 0, 2])
def test_ranks_together_give_every_row_once(
    name: str, ranks: int, workers: int | None, tmp_path: Path
) -> None:
    pipe = evaluation(SOURCES[name](tmp_path), "bytes", text="prompt", batch_size=4, num_shards=12)
    found = []
    for rank in range(ranks):
        own = pipe.distributed(rank=rank, world_size=ranks)
        loaded = own if workers is None else tp.Loader(own, num_workers=workers)
        rows = read(iter(loaded))
        assert rows == sorted(rows)
        found += rows
    assert sorted(found) == list(enumerate(TEXTS))


def test_a_resume_on_a_rank_goes_on_to_its_own_ragged_end() -> None:
    for rank in range(3):
        pipe = evaluation(tp.from_dataset(ROWS), "bytes", batch_size=4, num_shards=12)
        check_resume(pipe.distributed(rank=rank, world_size=3))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_run_saved_on_two_ranks_goes_on_on_others(ranks: int) -> None:
    def pipe(rank: int, world: int) -> tp.Pipeline:
        found = evaluation(tp.from_dataset(ROWS), "bytes", batch_size=4, num_shards=12)
        return found.distributed(rank=rank, world_size=world)

    rows, states = [], []
    for rank in (0, 1):
        iterator = iter(pipe(rank, 2))
        rows += read(batch for batch, _ in zip(iterator, range(3), strict=False))
        states.append(pipe(rank, 2).state_at(3))
    for rank in range(ranks):
        own = pipe(rank, ranks)
        own.load_state_dict(states[0])
        rows += read(iter(own))
    assert states[0] == states[1]
    assert [row for row, _ in sorted(rows)] == list(range(53))


def test_batches_hold_what_sft_makes_of_the_rows() -> None:
    rows = tp.from_dataset(ROWS)
    batches = list(evaluation(rows, "bytes", batch_size=8, max_length=20))
    names = ["attention_mask", "input_ids", "labels", "row"]
    assert [sorted(batch) for batch in batches] == [names] * 7
    assert [len(batch["row"]) for batch in batches] == [8] * 6 + [5]
    assert batches[0]["row"].dtype == torch.int64
    trained = sft(rows, "bytes", batch_size=1, max_length=20)
    one = {tuple(batch["input_ids"][0].tolist()): batch for batch in trained}
    for batch in evaluation(rows, "bytes", batch_size=1, max_length=20):
        same = one[tuple(batch["input_ids"][0].tolist())]
        assert torch.equal(batch["labels"], same["labels"])
        assert torch.equal(batch["attention_mask"], same["attention_mask"])


def test_prompts_for_generation_are_padded_on_the_left_and_keep_their_references() -> None:
    pipe = evaluation(
        tp.from_dataset(ROWS), "bytes", prompt="prompt", keep=["response", "id"], padding_side="left",
        batch_size=2,
    )  # fmt: skip
    batch = pipe.peek()
    assert sorted(batch) == ["attention_mask", "id", "input_ids", "response", "row"]
    assert batch["response"] == [" 0", " 2"]
    assert batch["id"] == ["r0", "r1"]
    assert batch["attention_mask"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10]
    kept = evaluation(tp.from_dataset(ROWS), "bytes", text="prompt", keep="prompt", batch_size=2)
    assert kept.peek()["prompt"] == TEXTS[:2]


def test_rows_that_a_filter_leaves_keep_their_numbers() -> None:
    rows = (
        tp.from_dataset(ROWS).enumerate(output_column="row").filter(lambda row: row["row"] % 5 == 1)
    )
    pipe = evaluation(rows, "bytes", text="prompt", batch_size=2, num_shards=12)
    wanted = [pair for pair in enumerate(TEXTS) if pair[0] % 5 == 1]
    assert sorted(read(iter(pipe))) == wanted
    halves = [pipe.distributed(rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(pair for half in halves for pair in read(iter(half))) == wanted


def test_rows_may_be_none_empty_or_a_text() -> None:
    assert list(evaluation(tp.from_dataset([]), "bytes", text="text")) == []
    batch = evaluation(tp.from_dataset([{"text": ""}, {"text": "a"}]), "bytes").peek()
    assert batch["attention_mask"].tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("rows", "options", "error", "said"),
    [
        (tp.from_dataset(ROWS).shuffle(3), {}, tp.ConfigError, r"in file order.* got rows of shuffle\(\)"),
        (tp.from_dataset(ROWS).sharding_filter(2), {}, tp.ConfigError, r"got rows of sharding_filter\(\)"),
        (tp.from_dataset(ROWS).repeat(), {}, tp.ConfigError, r"got rows of repeat\(\)"),
        (tp.mix({"a": tp.from_dataset(ROWS)}), {}, tp.ConfigError, r"mix\(\).*sources of a mix one by one"),
        (tp.from_dataset(ROWS).filter(bool), {}, tp.ConfigError, r"enumerate\(.*put it before filter\(\)"),
        (tp.from_dataset(ROWS).rename({"id": "row"}), {}, tp.SchemaError, "a column 'row' already"),
        (tp.from_dataset(ROWS), {"text": "id", "prompt": "id"}, tp.ConfigError, "and response, or text"),
        (tp.from_dataset(ROWS), {"keep": ["idd"]}, tp.SchemaError, r"no column 'idd' \(did you mean 'id'"),
        (tp.from_dataset([{"x": "a"}]), {}, tp.SchemaError, r"columns are \['x'\], .*tried were text"),
        (tp.from_dataset([{"text": "a"}, {"text": None}]), {}, tp.DataError, r"'text' is null.*row 1\)"),
    ],
)  # fmt: skip
def test_what_is_not_right_is_refused(
    rows: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        evaluation(rows, "bytes", **options).peek()


def test_rows_of_a_mix_have_no_place_in_a_file() -> None:
    with pytest.raises(tp.ConfigError, match=r"put it before mix\(\), in each of its sources"):
        tp.mix({"a": tp.from_dataset(ROWS), "b": tp.from_dataset(ROWS)}).enumerate()


# The script


@pytest.mark.slow
def test_two_ranks_score_as_one_does(tmp_path: Path) -> None:
    options = ["--files", str(files("parquet", tmp_path / "rows")), "--device", "cpu"]
    options += ["--checkpoint-dir", str(tmp_path / "run"), "--batch-size", "4"]
    size = ["--width", "16", "--layers", "1", "--heads", "2", "--max-length", "48"]
    state, deterministic = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    try:
        train_sft.main([*options, *size, "--steps", "5"])
        mean = evaluate.main(options)
    finally:
        torch.set_rng_state(state)
        torch.use_deterministic_algorithms(deterministic)
    one = (tmp_path / "run" / "scores.jsonl").read_text()
    rows = [json.loads(line) for line in one.splitlines()]
    assert [row["row"] for row in rows] == list(range(53))
    assert [row["tokens"] for row in rows] == [len(row["response"]) + 1 for row in ROWS]
    tokens = sum(row["tokens"] for row in rows)
    assert mean == pytest.approx(sum(row["loss"] * row["tokens"] for row in rows) / tokens)
    launch = Launch(Path(evaluate.__file__), 2, tmp_path / "two", *options)
    assert launch.wait() == 0
    other = [
        json.loads(line) for line in (tmp_path / "run" / "scores.jsonl").read_text().splitlines()
    ]
    assert [(row["row"], row["tokens"]) for row in other] == [
        (row["row"], row["tokens"]) for row in rows
    ]
    assert [row["loss"] for row in other] == pytest.approx([row["loss"] for row in rows], rel=1e-5)
