"""What ``tabular`` makes of a table, what is held out, and what it refuses."""

from __future__ import annotations

import datetime
import math
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from every_recipe import purchases
from resuming import check_resume
from trainpipes_recipes import tabular, training
from trainpipes_recipes.train_tabular import network_of

SMALL: dict[str, Any] = {"batch_size": 4, "num_shards": 4, "buffer_size": 16, "drop_last": False}
CATEGORIES = ["user", "item", "device", "seen"]
LATE = [["day", ">=", "2026-03-01"]]


def whole(pipe: tp.Pipeline) -> dict[str, torch.Tensor]:
    """All rows of an epoch as one batch."""
    batches: list[dict[str, torch.Tensor]] = list(pipe)
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    lengths = [np.diff([*batch["seen_offsets"].tolist(), len(batch["seen"])]) for batch in batches]
    return {**joined, "seen_lengths": torch.from_numpy(np.concatenate(lengths))}


def test_batches_hold_what_numpy_makes_of_the_training_part(folder: Path) -> None:
    path = purchases(folder)
    table = pq.read_table(path)
    held_out = pc.greater_equal(table["day"], pa.scalar(datetime.date(2026, 3, 1)))
    train, valid = table.filter(pc.invert(held_out)), table.filter(held_out)
    options: dict[str, Any] = {
        "categories": CATEGORIES,
        "numbers": ["income", "price"],
        "valid": LATE,
    }
    found = whole(tabular(path, train=False, **SMALL | {"num_shards": 1}, **options))
    assert len(found["labels"]) == len(valid) > 30
    for place, name in enumerate(("income", "price")):
        numbers = np.array(train[name].drop_null().to_pylist())
        given = np.array([np.nan if v is None else v for v in valid[name].to_pylist()])
        expected = np.nan_to_num((given - numbers.mean()) / numbers.std())
        assert np.allclose(found["numbers"][:, place].numpy(), expected, atol=1e-4)
    for place, name in enumerate(("user", "item", "device")):
        known = set(train[name].drop_null().to_pylist())
        values = valid[name].to_pylist()
        expected = [0 if v is None else 1 if v not in known else 2 for v in values]
        assert found["categories"][:, place].clamp(max=2).tolist() == expected
        pairs = zip(values, found["categories"][:, place].tolist(), strict=True)
        assert len(set(pairs)) == len(set(values))  # equal values have equal ids
    assert 1 in found["categories"][:, 0]
    assert found["labels"].tolist() == [int(v) for v in valid["label"].to_pylist()]
    assert found["seen_lengths"].tolist() == [len(v) for v in valid["seen"].to_pylist()]
    trained = whole(tabular(path, **SMALL, **options))
    assert len(trained["labels"]) == len(train)
    assert abs(float(trained["numbers"][:, 1].mean())) < 1e-4
    assert float(trained["numbers"][:, 1].std(unbiased=False)) == pytest.approx(1, abs=1e-3)


def test_numbers_are_in_their_order_and_absent_where_there_are_none() -> None:
    rows = tp.from_dataset([{"a": n, "b": -n, "c": "x", "label": n % 2} for n in range(8)])
    batch = tabular(rows, numbers=["b", "a"], **SMALL).peek()
    assert torch.equal(batch["numbers"][:, 0], -batch["numbers"][:, 1])
    assert list(tabular(rows, numbers=[], **SMALL).peek()) == ["categories", "labels"]
    assert list(tabular(rows, numbers=["a"], categories=[], **SMALL).peek()) == [
        "numbers",
        "labels",
    ]
    one = tabular(rows.rename({"a": "age"}), numbers="age", categories="c", **SMALL).peek()
    assert (one["numbers"].shape, one["categories"].shape) == ((4, 1), (4, 1))


@pytest.mark.parametrize(
    ("labels", "options", "dtype", "found"),
    [
        (["b", "a", "b"], {}, torch.int64, [1, 0, 1]),
        (["b", "a", "b"], {"classes": ["b", "a"]}, torch.int64, [0, 1, 0]),
        ([True, False, True], {}, torch.int64, [1, 0, 1]),
        ([2, 0, 1], {}, torch.int64, [2, 0, 1]),
        ([-1, 1, -1], {}, torch.int64, [0, 1, 0]),
        ([0.5, 2.0, -1.5], {}, torch.float32, [0.5, 2.0, -1.5]),
        ([Decimal("0.50"), Decimal("2.00"), Decimal("-1.50")], {}, torch.float32, [0.5, 2.0, -1.5]),
    ],
)
def test_labels_are_classes_or_numbers_by_their_type(
    labels: Any, options: Any, dtype: torch.dtype, found: list[Any]
) -> None:
    table = pa.table({"x": [1.0, 2.0, 3.0], "label": labels})
    batch = tabular(tp.from_arrow(table), batch_size=3, num_shards=1, **options).peek()
    ordered = batch["labels"][batch["numbers"][:, 0].argsort()]
    assert (ordered.dtype, ordered.tolist()) == (dtype, found)


def test_columns_that_split_or_weigh_are_features_only_where_they_are_asked_for() -> None:
    days = [datetime.date(2026, 1, n) for n in range(1, 9)]
    columns = {"x": [0.5] * 8, "w": [1.0, 0.5] * 4, "user": range(8), "day": days}
    rows = tp.from_arrow(pa.table({**columns, "city": list("abcdabcd"), "label": [1, 0] * 4}))
    early = [["day", "<", "2026-01-07"]]
    options: list[dict[str, Any]] = [
        {"weights": "w"},
        {"valid": 0.5, "key": ["user", "city"]},
        {"valid": [early, [["city", "=", "a"]]], "weights": "w"},
        {"valid": early, "weights": "w", "numbers": ["w", "day"]},
        {"valid": early, "categories": ["user"]},
    ]
    found = [tabular(rows, **SMALL | {"num_shards": 1}, **more).peek() for more in options]
    shapes = [
        [batch[n].shape[1] if n in batch else 0 for n in ("numbers", "categories")]
        for batch in found
    ]
    assert shapes == [[3, 1], [3, 0], [2, 0], [2, 1], [2, 1]]


def test_rows_without_a_day_are_in_neither_part() -> None:
    days = [None, *(datetime.date(2026, 1, n) for n in range(1, 10))]
    rows = tp.from_arrow(pa.table({"day": days, "x": range(10), "label": [0, 1] * 5}))
    options: dict[str, Any] = {"valid": [["day", ">=", "2026-01-07"]], "numbers": ["x"], **SMALL}
    counts = [
        sum(len(b["labels"]) for b in tabular(rows, train=t, **options)) for t in (True, False)
    ]
    assert counts == [6, 3]


def test_users_stay_in_one_part(folder: Path) -> None:
    rows = tp.read_parquet(purchases(folder)).with_columns(
        lambda columns: {"key": columns["user"]}, format="numpy"
    )
    options: dict[str, Any] = {"numbers": ["user"], "categories": ["device"], "valid": 0.3, **SMALL}
    fitted = rows.fit_columns("user", ["device", "label"])
    options |= {"key": "key", "fitted": fitted}
    train, valid = (
        {round(fitted.denormalize("user", v)) for b in tabular(rows, train=t, **options) for v in
            b["numbers"][:, 0].tolist()}
        for t in (True, False)
    )  # fmt: skip
    assert train
    assert valid
    assert not train & valid


def test_what_was_fitted_is_written_once_and_read_after_that(folder: Path, tmp_path: Path) -> None:
    path, options = purchases(folder), {"categories": CATEGORIES, "valid": LATE, **SMALL}
    first = tabular(path, fitted=tmp_path / "columns.json", **options)
    written = (tmp_path / "columns.json").read_text()
    state = iter(first).state_dict()
    again = tabular(path, fitted=str(tmp_path / "columns.json"), **options)
    again.load_state_dict(state)
    tabular(path, **options).load_state_dict(state)  # by a pass of its own
    assert (tmp_path / "columns.json").read_text() == written
    others = pq.read_table(path).slice(0, 9)
    pq.write_table(others, tmp_path / "others.parquet")
    given: dict[str, Any] = {"categories": CATEGORIES, **SMALL, "train": False}
    with pytest.raises(
        tp.ConfigError, match=r"tabular\(fitted\) must be given to evaluate rows that"
    ):
        tabular(tmp_path / "others.parquet", **given)
    with pytest.raises(tp.errors.MissingFilesError, match=r"colums\.json"):
        tabular(tmp_path / "others.parquet", fitted=tmp_path / "colums.json", **given)
    assert not (tmp_path / "colums.json").exists()
    found = tabular(tmp_path / "others.parquet", fitted=tmp_path / "columns.json", **given)
    assert sum(len(batch["labels"]) for batch in found) == 9
    fewer = tabular(path, fitted=tmp_path / "columns.json", **options, max_size=2)
    with pytest.raises(tp.StateError, match="categories"):
        fewer.load_state_dict(state)


def test_rare_values_and_rare_classes(folder: Path) -> None:
    path = purchases(folder)
    pipe = tabular(path, categories=CATEGORIES, **SMALL, max_size=3, min_count=2)
    stage: Any = next(stage for stage in pipe.stages if stage.name == "encode_categories")
    assert stage.sizes == dict.fromkeys(CATEGORIES, 5)
    assert whole(pipe)["categories"].max() == 4
    labels = whole(tabular(path, categories=CATEGORIES, **SMALL))["labels"]
    fewer = whole(tabular(path, categories=CATEGORIES, **SMALL, weights={True: 1, False: 0}))[
        "labels"
    ]
    assert fewer.tolist() == [1] * int(labels.sum())


def test_a_part_of_the_rows_is_enough_to_fit(folder: Path) -> None:
    pipe = tabular(purchases(folder), categories=["user"], fit_rows=50, **SMALL)
    stage: Any = next(stage for stage in pipe.stages if stage.name == "normalize_columns")
    assert stage.numbers["price"]["mean"] > 0


def test_evaluation_is_exact_on_any_ranks(folder: Path) -> None:
    pipe = tabular(purchases(folder), categories=CATEGORIES, valid=LATE, train=False, **SMALL)
    check_resume(pipe, every=3, processes=0, epochs=1)
    labels = [label for batch in pipe for label in batch["labels"].tolist()]
    ranks = [pipe.distributed(rank=rank, world_size=2) for rank in (0, 1)]
    shared = [label for rank in ranks for batch in rank for label in batch["labels"].tolist()]
    assert sorted(shared) == sorted(labels)


def test_the_index_that_pandas_writes_is_no_number_to_learn_from(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",age,label\n0,20,1\n1,60,0\n")
    (batch,) = tabular(path, **SMALL | {"num_shards": 1}, train=True)
    assert sorted(batch["numbers"].tolist()) == [[-1.0], [1.0]]


@pytest.mark.parametrize(("columns", "options", "error", "said"), [
    ({"x": [1, 2]}, {}, tp.SchemaError, "label"),
    ({"x": [1, 2], "y": [0, 1]}, {"label": "z"}, tp.SchemaError, r"no column 'z', only \['x', 'y'\]"),
    ({"label": [0, 1]}, {}, tp.ConfigError, "columns of numbers and of categories, each once, got none"),
    ({"x": [1, 2], "label": [0, 1]}, {"numbers": ["x"], "categories": ["x"]}, tp.ConfigError, "'x' twice"),
    ({"x": [1, 2], "label": [0, 1]}, {"numbers": ["label"]}, tp.ConfigError, "'label' twice"),
    ({"labels": [["a"], []], "y": [0, 1]}, {"label": "y"}, tp.ConfigError, "another name than 'labels'"),
    ({"x": [1, 2], "y": [1, 2], "label": [0, 1]}, {"key": "x"}, tp.ConfigError,
        r"tabular\(key\) must be given with"),
    ({"x": [1, 2], "label": [0, 1]}, {"valid": 1.0}, tp.ConfigError, r"above 0 and below 1, got 1.0"),
    *(({"x": [1, 2], "y": [1, 2], "label": [0, 1]}, {"valid": valid}, tp.ConfigError,
        r"tabular\(valid\) must be")
      for valid in ([["x", "?", 1]], [], [[]], pc.field("x") > 1, {"x": 1})),
    ({"x": [1, 2], "label": [0, 1]}, {"numbers": ["x"], "valid": [["x", ">", 0]]}, tp.DataError,
        "check what leaves rows out"),
    *(({"x": ["a", "b"], "label": [0, 1]}, option, tp.ConfigError, r"tabular\(m.*\) must be an integer of 1")
      for option in ({"max_size": -1}, {"max_size": 0}, {"min_count": 0})),
    ({"x": [1, 2], "label": [0, 1]}, {"valid": [["q", ">", 1]]}, tp.SchemaError, "no column 'q'"),
    ({"x": [1, 2], "label": [0, 1]}, {"valid": 0.5, "drop_last": True, "num_shards": 24}, tp.ConfigError,
        r"tabular\(batch_size\) must leave each shard a batch, got 4 of 0 rows in each of 24 shards"),
    ({"x": [1, 2], "label": [0, 1]}, {"fitted": tp.FittedColumns(1)}, tp.ConfigError,
        r"tabular\(fitted\) must know the column 'x'"),
    ({"x": [1.0, float("inf")], "label": [0, 1]}, {}, tp.DataError, r"is inf.*row 1\)"),
    ({"x": [1, 2], "label": [0, None]}, {}, tp.DataError, r"holds a null, which is no label.*row 1\)"),
    *(({"x": [1, 2], "label": labels}, {"batch_size": 2, "num_shards": 1}, tp.DataError,
        r"'label' holds a null or NaN, which is no label.*row 1\)")
        for labels in ([0.5, math.nan], pa.array([1, math.nan], "float32"), [Decimal("0.5"), None])),
    *(({"x": [1, 2], "label": pa.array([1, far], kind)}, {"batch_size": 2, "num_shards": 1}, tp.DataError,
        r"'label' holds an infinite number, which is no label.*row 1\)")
        for far, kind in ((math.inf, "float64"), (-math.inf, "float32"))),
    ({"x": [1, None], "label": [0, 1]}, {"nulls": "raise"}, tp.DataError, r"is null or NaN.*row 1\)"),
    ({"x": [b"a", b"b"], "label": [0, 1]}, {"categories": ["x"]}, tp.SchemaError, "must hold labels"),
])  # fmt: skip
def test_what_is_not_right_is_refused(
    columns: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        list(tabular(tp.from_arrow(pa.table(columns)), **SMALL | options))


@pytest.mark.slow
def test_a_killed_training_goes_on_with_the_very_next_batch(folder: Path, tmp_path: Path) -> None:
    """Its process is killed; started again, it ends with the weights of one that was left alone."""
    script = [
        sys.executable,
        "-m",
        "trainpipes_recipes.train_tabular",
        "--files",
        purchases(folder),
    ]
    script += ["--categories", *CATEGORIES, "--valid", "day", ">=", "2026-03-01", "--steps", "300"]
    script += ["--batch-size", "2", "--save-every", "20", "--lr", "0.01"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(name: str) -> subprocess.Popen[bytes]:
        given = ["--output", str(tmp_path / name), "--columns", str(tmp_path / f"{name}.json")]
        return subprocess.Popen([*script, *given], env=environment, stdout=subprocess.DEVNULL)

    assert run("alone").wait(300) == 0
    killed = run("killed")
    while not list((tmp_path / "killed").glob("step-*.pt")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "model").exists()
    assert run("killed").wait(300) == 0
    weights = [
        torch.load(tmp_path / name / "model" / "weights.pt", weights_only=True)
        for name in ("alone", "killed")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_rate_of_training_scripts_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    theirs = transformers.get_scheduler("cosine", optimizer, 3, 20).lr_lambdas[0]
    for step in range(21):
        assert training.share_of_rate(3, 20, step) == pytest.approx(theirs(step), abs=1e-12)


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
def test_the_index_of_pandas_is_no_number_to_learn_from(name: str) -> None:
    rows = tp.from_arrow(pa.table({name: range(8), "a": [0.5] * 8, "y": [0, 1] * 4}))
    batch = tp.recipe("tabular", rows, label="y", batch_size=4, num_shards=1).peek()
    assert batch["numbers"].shape == (4, 1)
    if name:
        asked = tp.recipe("tabular", rows, label="y", numbers=[name], batch_size=4, num_shards=1)
        assert asked.peek()["numbers"].shape == (4, 1)


def test_structs_are_left_out_of_tables_and_of_rows_alike() -> None:
    table = pa.table({"a": [0.5] * 4, "s": ["x"] * 4, "meta": [{"b": 1}] * 4, "y": [0, 1, 0, 1]})
    for rows in (tp.from_arrow(table), tp.from_dataset(table.to_pylist())):
        batch = tp.recipe("tabular", rows, label="y", batch_size=4, num_shards=1).peek()
        assert {name: list(tensor.shape) for name, tensor in batch.items()} == {
            "numbers": [4, 1], "categories": [4, 1], "labels": [4],
        }  # fmt: skip


def test_columns_taken_by_their_types_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rows = tp.from_dataset([{"id": n, "city": "ab"[n % 2], "label": n % 2} for n in range(4)])
    options: dict[str, Any] = {"batch_size": 2, "num_shards": 1}
    with caplog.at_level("INFO", "trainpipes"):
        tabular(rows, label="label", numbers=["id"], categories=["city"], **options)
        assert caplog.messages == []
        tabular(rows, label="label", **options)
    assert caplog.messages == ["tabular takes numbers from ['id'], categories from ['city']"]


def test_what_columns_hold_is_told_by_more_than_the_first_of_pythons_rows() -> None:
    """A None, a tuple or an array says nothing of the type, and an integer may stand beside floats."""
    rows = [
        {"age": None, "city": None, "seen": (1, 2), "at": np.array([3]), "label": 1},
        {"age": 2, "city": "x", "seen": (), "at": np.array([4, 5]), "label": 2.5},
    ]
    far = [{**row, "far": np.array([0.5, 1.5]), "none": None} for row in rows]  # are no categories
    for data in (rows, far):
        batch = tabular(tp.from_dataset(data), batch_size=2, num_shards=1).peek()
        assert {name: list(tensor.shape) for name, tensor in batch.items()} == {
            "numbers": [2, 1], "categories": [2, 1], "seen": [2], "seen_offsets": [2],
            "at": [3], "at_offsets": [2], "labels": [2],
        }  # fmt: skip
        assert sorted(batch["labels"].tolist()) == [1.0, 2.5]
        assert sorted(batch["categories"].flatten().tolist()) == [0, 2]


def test_a_column_that_the_first_of_pythons_rows_lacks_is_one() -> None:
    rows = [{"x": 1.0, "label": 0}, {"x": 2.0, "age": 3.0, "city": "a", "label": 1}]
    batch = tabular(tp.from_dataset(rows), batch_size=2, num_shards=1).peek()
    assert {name: list(tensor.shape) for name, tensor in batch.items()} == {
        "numbers": [2, 2], "categories": [2, 1], "labels": [2],
    }  # fmt: skip


def test_lists_of_one_length_are_lists_of_categories() -> None:
    seen = pa.array([[1, 2], [2, 3], [1, 9], [2, 2]], pa.list_(pa.int64(), 2))
    far = pa.array([[0.5, 1.5]] * 4, pa.list_(pa.float32(), 2))
    rows = tp.from_arrow(pa.table({"x": range(4), "seen": seen, "far": far, "label": [0, 1] * 2}))
    asked: list[dict[str, Any]] = [{}, {"categories": ["seen"]}]
    for options in asked:
        batch = tabular(rows, batch_size=4, num_shards=1, **options).peek()
        assert {name: list(tensor.shape) for name, tensor in batch.items()} == {
            "numbers": [4, 1], "seen": [8], "seen_offsets": [4], "labels": [4],
        }  # fmt: skip
    tensors = tp.from_tensors(seen=torch.tensor(seen.to_pylist()), label=torch.arange(4) % 2)
    with pytest.raises(tp.SchemaError, match="'seen' holds tensors of several values: make"):
        tabular(tensors, numbers=[], categories=["seen"], batch_size=4, num_shards=1).peek()


def test_a_network_takes_lists_of_any_name() -> None:
    rows = [{"items": [n, 7], "a.b": [n], "label": n % 2} for n in range(4)]
    pipe = tabular(tp.from_dataset(rows), batch_size=4, num_shards=1)
    assert network_of(pipe)(pipe.peek()).shape == (4, 2)
