"""What ``tabular`` makes of tables: the values of code that does it by hand, and what it refuses."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainpipes as tp
from elastic.laws import assert_ranks_agree, assert_resumes_elsewhere
from recipes.trained import check_training, real_text, short_and_long
from trainpipes.testing import check_resume
from trainpipes_recipes import tabular
from trainpipes_recipes.tables.fit import TableFit
from trainpipes_recipes.tabular import fit_of
from trainpipes_recipes.train_tabular import Network


def table(rows: int = 500) -> pa.Table:
    """Made rows: numbers, some of them missing, and categories."""
    rng = np.random.default_rng(5)
    age, income = rng.normal(40, 12, rows), rng.lognormal(10, 1, rows)
    return pa.table(
        {
            "age": pa.array(age, mask=rng.random(rows) < 0.1),
            "income": income,
            "children": rng.integers(0, 5, rows),
            "city": pa.array(rng.choice(["Rome", "Oslo", "", "Bonn"], rows), mask=rng.random(rows) < 0.1),
            "member": rng.random(rows) < 0.5,
            "label": rng.choice(["no", "yes"], rows),
        }
    )  # fmt: skip


SMALL: dict[str, Any] = {"batch_size": 4, "buffer_size": 16, "num_shards": 12, "seed": 3}


def by_hand(rows: pa.Table) -> TensorDataset:
    """The tensors as code with pandas and scikit-learn makes them: StandardScaler after a SimpleImputer of
    the mean, OrdinalEncoder in sorted order, LabelEncoder."""
    frame: Any = {name: rows[name].to_pylist() for name in rows.column_names}
    numeric = []
    for name in ("age", "income", "children"):
        values = np.array([math.nan if v is None else v for v in frame[name]], dtype=np.float64)
        values = np.where(np.isnan(values), np.nanmean(values), values)
        there = np.array([v for v in frame[name] if v is not None], dtype=np.float64)
        numeric.append((values - there.mean()) / there.std())
    categorical = []
    for name in ("city", "member"):
        known = sorted({v for v in frame[name] if v is not None})
        categorical.append([1 if v is None else 2 + known.index(v) for v in frame[name]])
    labels = [sorted(set(frame["label"])).index(v) for v in frame["label"]]
    return TensorDataset(
        torch.from_numpy(np.stack(numeric, 1).astype(np.float32)),
        torch.tensor(categorical).T.contiguous(),
        torch.tensor(labels),
    )


def write(kind: str, folder: Path, rows: pa.Table) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(rows, path, row_group_size=77)
    elif kind == "csv":
        pyarrow.csv.write_csv(rows, path)
    else:
        tp.from_arrow(rows).write_json(path)
    return path


SOURCES: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda f: write("parquet", f, table()),
    "json": lambda f: write("json", f, table()),
    "from_arrow": lambda f: tp.from_arrow(table()),
    "from_dataset": lambda f: tp.from_dataset(table().to_pylist()),
}


@pytest.mark.parametrize("name", SOURCES)
def test_values_are_those_of_a_dataset_made_by_hand(name: str, tmp_path: Path) -> None:
    found = tabular(SOURCES[name](tmp_path), evaluate=True, batch_size=32)
    wanted = DataLoader(by_hand(table()), batch_size=32)
    assert len(found) == len(wanted)
    first = 0
    for batch, (numeric, categorical, labels) in zip(found, wanted, strict=True):
        assert set(batch) == {"row", "numeric", "categorical", "labels"}
        torch.testing.assert_close(batch["numeric"], numeric, rtol=1e-6, atol=1e-6)
        assert torch.equal(batch["categorical"], categorical)
        assert torch.equal(batch["labels"], labels)
        assert batch["row"].tolist() == list(range(first, first + len(labels)))
        first += len(labels)


def test_csv_files_hold_the_same_but_for_empty_texts(tmp_path: Path) -> None:
    rows = table().drop_columns(["city"])
    options: dict[str, Any] = {"evaluate": True, "batch_size": 500}
    found = tabular(write("csv", tmp_path, rows), **options).peek()
    wanted = tabular(tp.from_arrow(rows), **options).peek()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_training_gives_every_row_in_another_order() -> None:
    pipe = tabular(tp.from_arrow(table()), batch_size=50)
    first, second = (torch.cat([b["numeric"] for b in pipe]) for _ in range(2))
    whole = by_hand(table()).tensors[0][:, 1].sort().values
    for found in (first, second):
        torch.testing.assert_close(found[:, 1].sort().values, whole, rtol=1e-5, atol=1e-6)
    assert not torch.equal(first, second)


def test_a_mix_is_fitted_on_every_row_of_its_sources_once() -> None:
    rows = table()
    parts = {"a": tp.from_arrow(rows.slice(0, 100)), "b": tp.from_arrow(rows.slice(100)).shuffle(9)}
    mixed = tp.mix(parts, weights={"a": 1, "b": 1}, stop="repeat")
    fit, whole = fit_of(tabular(mixed)), fit_of(tabular(tp.from_arrow(rows)))
    assert fit.categorical == whole.categorical
    assert [c.mean for c in fit.numeric] == pytest.approx(
        [c.mean for c in whole.numeric], rel=1e-12
    )
    check_resume(tabular(mixed, **SMALL), limit=8, epochs=1)


def test_a_resume_is_exact_and_ranks_agree(tmp_path: Path) -> None:
    path = write("parquet", tmp_path, table(96))
    check_resume(tabular(path, **SMALL), every=3)
    check_resume(tabular(path, evaluate=True, batch_size=8, num_shards=12), every=3)
    assert_ranks_agree(tabular(path, **SMALL))
    assert_resumes_elsewhere(tabular(path, **SMALL))
    assert_ranks_agree(tabular(path, evaluate=True, batch_size=8, num_shards=12))


# The fit


def test_a_fit_is_the_same_after_json_to_the_last_bit(tmp_path: Path) -> None:
    fit = fit_of(tabular(tp.from_arrow(table())))
    assert TableFit.from_json(fit.to_json()) == fit
    path = tmp_path / "folder" / "fit.json"
    fit.save(path)
    assert TableFit.load(path) == fit
    assert list(path.parent.iterdir()) == [path]
    assert fit.cardinalities == [6, 4]
    with pytest.raises(AttributeError):
        fit.rows = 3  # type: ignore[misc]


def test_evaluation_takes_the_fit_that_training_wrote(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    train = pa.table({"x": [1.0, 2.0, 3.0], "city": ["Rome", "Oslo", None]})
    pipe = tabular(tp.from_arrow(train), fit=path)
    held_out = pa.table({"x": [2.0, None, 5.0], "city": ["Oslo", "Bonn", None], "other": [1, 2, 3]})
    batch = tabular(tp.from_arrow(held_out), fit=path, evaluate=True).peek()
    std = math.sqrt(2 / 3)
    assert batch["numeric"].tolist() == [[0.0], [0.0], [pytest.approx(3 / std)]]
    assert batch["categorical"].tolist() == [[2], [0], [1]]
    given = tabular(tp.from_arrow(held_out), fit=fit_of(pipe), evaluate=True).peek()
    assert torch.equal(given["numeric"], batch["numeric"])


def test_a_state_knows_the_exact_fit() -> None:
    rows = tp.from_arrow(pa.table({"x": [1.0, 2.0, 4.0], "c": ["a", "b", "a"]}))
    fit = fit_of(tabular(rows))
    state = iter(tabular(rows, fit=fit, **SMALL)).state_dict()
    tabular(rows, fit=TableFit.from_json(fit.to_json()), **SMALL).load_state_dict(state)
    content = json.loads(fit.to_json())
    content["numeric"][0]["mean"] = math.nextafter(content["numeric"][0]["mean"], 9)
    other = tabular(rows, fit=TableFit.from_json(json.dumps(content)), **SMALL)
    with pytest.raises(tp.StateError, match="fit"):
        other.load_state_dict(state)
    content = json.loads(fit.to_json())
    content["categorical"][0]["values"] = ["b", "a"]
    other = tabular(rows, fit=TableFit.from_json(json.dumps(content)), **SMALL)
    with pytest.raises(tp.StateError, match="fit"):
        other.load_state_dict(state)


def test_parts_are_added_up_as_if_they_came_at_once() -> None:
    values = np.random.default_rng(0).normal(1e6, 1e-3, 200_000)
    rows = pa.table({"x": pa.chunked_array([values[:7], values[7:150_000], values[150_000:]])})
    (found,) = TableFit.of(tp.from_arrow(rows), numeric=["x"]).numeric
    assert found.mean == pytest.approx(values.mean(), rel=1e-14)
    assert found.std == pytest.approx(values.std(), rel=1e-9)
    assert (found.min, found.max) == (values.min(), values.max())


# Odd columns


def batch_of(columns: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    rows = tp.from_arrow(pa.table(columns))
    batch: dict[str, torch.Tensor] = tabular(rows, evaluate=True, **options).peek()
    return batch


@pytest.mark.parametrize(
    ("values", "options", "found"),
    [
        ([0.1] * 7, {}, [0.0] * 7),  # whose mean is not 0.1 to the last bit
        (pa.nulls(3), {"numeric": ["x"]}, [0.0] * 3),
        ([1.0, math.nan, 3.0], {}, [-1, 0, 1]),
        ([1, None, 3], {"missing": "indicator"}, [[-1, 0], [0, 1], [1, 0]]),
        ([5, None, 9], {"scaling": "minmax"}, [0, 0.5, 1]),
        ([5, 5], {"scaling": "minmax"}, [0, 0]),
        ([5, None, 9], {"scaling": "none"}, [5, 7, 9]),
        ([True, False], {"numeric": ["x"]}, [1, -1]),
        ([Decimal("1.5"), Decimal("2.5")], {}, [-1, 1]),
        (pa.array([2**63, 0], pa.uint64()), {}, [1, -1]),
    ],
)
def test_numbers_of_all_kinds(values: Any, options: Any, found: Any) -> None:
    wanted = torch.tensor(found, dtype=torch.float32).reshape(len(found), -1)
    assert torch.equal(batch_of({"x": values}, **options)["numeric"], wanted)


@pytest.mark.parametrize(
    ("values", "options", "found"),
    [
        (["b", "a", None, " a", ""], {}, [5, 4, 1, 3, 2]),
        ([True, None, False], {}, [3, 1, 2]),
        ([7, 5, None], {"categorical": ["x"]}, [3, 2, 1]),
        ([7.0, math.nan, 5.0], {"categorical": ["x"]}, [3, 1, 2]),
        (pa.array(["y", "x", None]).dictionary_encode(), {}, [3, 2, 1]),
        (pa.nulls(2), {"categorical": ["x"]}, [1, 1]),
        (["a", "b", "a"], {"min_count": 2}, [2, 0, 2]),
    ],
)
def test_categories_of_all_kinds(values: Any, options: Any, found: list[int]) -> None:
    assert batch_of({"x": values}, **options)["categorical"].flatten().tolist() == found


def test_a_hundred_thousand_categories_are_told_apart() -> None:
    names = [f"n{k}" for k in range(100_000)]
    pipe = tabular(tp.from_arrow(pa.table({"x": names})), evaluate=True, batch_size=100_000)
    assert len(pipe.peek()["categorical"].unique()) == 100_000
    assert len(json.dumps(iter(pipe).state_dict())) < 2000


def test_what_is_to_predict_is_a_class_or_a_number() -> None:
    x = {"x": [1, 2]}
    assert batch_of(x | {"y": [1.5, 2.0]}, label="y")["labels"].tolist() == [1.5, 2.0]
    assert batch_of(x | {"y": [1.5, 2.0]}, label="y")["labels"].dtype == torch.float32
    assert batch_of(x | {"y": [3, 4]}, label="y", target="number")["labels"].dtype == torch.float32
    assert batch_of(x | {"y": [1.0, 0.0]}, label="y", target="class")["labels"].tolist() == [1, 0]
    assert batch_of(x | {"y": ["b", "a"]}, label="y", classes=["b", "a"])["labels"].tolist() == [
        0,
        1,
    ]
    assert "labels" not in batch_of(x)
    weights = tabular(tp.from_arrow(pa.table(x | {"label": [True, False]}))).class_weights()
    assert weights.tolist() == [1, 1]


def test_columns_are_found_by_their_types(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trainpipes"):
        batch_of({"a": [1], "b": ["x"], "c": [[1]], "target": [0]})
    assert "numeric=['a'], categorical=['b'], and leaves ['c'] out" in caplog.text
    assert "label from column 'target'" in caplog.text


@pytest.mark.parametrize(
    ("columns", "options", "error", "said"),
    [
        ({"x": [1.0, math.inf]}, {}, tp.DataError, r"'x' holds inf, which cannot be scaled.*row 1\)"),
        ({"x": [1e308, -1e308]}, {}, tp.DataError, r"up to 1e\+308, too large to scale"),
        ({"x": ["a"]}, {"numeric": ["x"]}, tp.SchemaError, "'x' must hold numbers, got string"),
        ({"x": [1.0, 1.5]}, {"categorical": ["x"]}, tp.DataError, r"that are not whole.*row 1\)"),
        ({"x": pa.array([2**63], pa.uint64())}, {"categorical": ["x"]}, tp.DataError, "63 bits"),
        ({"x": [[1]]}, {}, tp.SchemaError, r"no column holds numbers, texts or bools; there are \['x'\]"),
        ({"x": [[1]]}, {"categorical": ["x"]}, tp.SchemaError, "texts, integers or bools, got list"),
        ({"x": [1, 2]}, {"numeric": ["y"]}, tp.SchemaError, "no column 'y'"),
        ({"x": [1, 2]}, {"numeric": "x"}, tp.ConfigError, "list of column names, got 'x'"),
        ({"x": [1, 2]}, {"numeric": ["x", "x"]}, tp.ConfigError, "each once, got 'x' twice"),
        ({"x": [1], "label": [0]}, {"numeric": ["label"]}, tp.ConfigError, "got 'label' twice"),
        ({"x": [1, 2]}, {"numeric": []}, tp.ConfigError, "each once, got none"),
        ({"x": [1, 2]}, {"fit": 3}, tp.ConfigError, "a TableFit, or a path of its JSON, got 3"),
        ({"x": [1, 2]}, {"min_count": 0}, tp.ConfigError, "1 or more, got 0"),
        ({"x": [1, 2]}, {"scaling": "std"}, tp.ConfigError, 'scaling.* got \'std\''),
        ({"x": [1, 2], "label": [1.5, None]}, {}, tp.DataError, r"is to be predicted.*row 1\)"),
        ({"x": [1, 2], "label": [1, None]}, {}, tp.DataError, r"a null.*row 1\)"),
        ({"x": pa.array([], pa.int64())}, {}, tp.DataError, "there are no rows"),
    ],
)  # fmt: skip
def test_what_is_not_right_is_refused(
    columns: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        batch_of(columns, **options)


def test_a_bad_value_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": [1.0, 2.0, -math.inf]}), path, row_group_size=2)
    with pytest.raises(tp.DataError, match=r"-inf.*x\.parquet, row group 1, row 2\)"):
        tabular(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": 1, "numeric": [{"name": "x"}]}'])
def test_a_file_that_is_no_fit_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text(text)
    with pytest.raises(tp.ConfigError, match=r"fit\.json: a fit is JSON that .* wrote"):
        tabular(tp.from_arrow(table()), fit=path)


def test_data_that_does_not_go_with_a_fit_is_refused() -> None:
    fit = fit_of(tabular(tp.from_arrow(pa.table({"x": [1, 2], "c": ["a", "b"]}))))
    with pytest.raises(tp.DataError, match="holds integers, and was fitted on texts"):
        batch_of({"x": [1], "c": [1]}, fit=fit)
    with pytest.raises(tp.SchemaError, match="no column 'c'"):
        batch_of({"x": [1]}, fit=fit)
    with pytest.raises(tp.ConfigError, match=r"numeric\) is \['y'\], and the fit has \['x'\]"):
        batch_of({"x": [1], "y": [1], "c": ["a"]}, fit=fit, numeric=["y"])


# Training


@short_and_long
def test_a_model_learns_from_it_and_resumes(steps: int, below: float, tmp_path: Path) -> None:
    """Whether a text is the start or the body of a function of Python's standard library, by counts of its
    characters and its first word."""
    columns: dict[str, list[Any]] = {
        "length": [],
        "lines": [],
        "quotes": [],
        "word": [],
        "label": [],
    }
    for pair in real_text():
        for label, text in zip(("head", "body"), pair, strict=True):
            row = len(text), text.count("\n"), text.count('"'), (text.split() or [None])[0], label
            for values, value in zip(columns.values(), row, strict=True):
                values.append(value)
    rows = tp.from_arrow(pa.table(columns))
    check_training(
        lambda: tabular(rows, batch_size=32, min_count=3),
        lambda: Network(fit_of(tabular(rows, min_count=3)), 2),
        lambda model, batch: F.cross_entropy(model(batch), batch["labels"]),
        tmp_path,
        steps=steps,
        below=below,
    )


def test_a_target_that_is_neither_is_refused() -> None:
    rows = tp.from_dataset([{"x": 1.0, "label": 1.0}])
    with pytest.raises(tp.ConfigError, match='"class" or "number", got \'regression\''):
        tabular(rows, target="regression")  # type: ignore[arg-type]


def test_evaluation_takes_what_training_has_fitted(tmp_path: Path) -> None:
    train = tp.from_dataset([{"x": float(k), "label": "abc"[k % 3]} for k in range(6)])
    rows = tp.from_dataset([{"x": 1.0, "label": "c"}, {"x": 2.0, "label": "b"}])
    fit = tmp_path / "fit.json"
    with pytest.raises(tp.ConfigError, match="takes the fit of the training data"):
        tabular(rows, fit=fit, evaluate=True)
    assert not fit.exists()
    tabular(train, fit=fit)
    with pytest.raises(tp.ConfigError, match="training has numbered: pass the same ones"):
        tabular(rows, fit=fit, evaluate=True)
    batch = tabular(rows, fit=fit, evaluate=True, classes=["a", "b", "c"]).peek()
    assert batch["labels"].tolist() == [2, 1]


def test_the_number_of_a_row_is_no_feature() -> None:
    rows = tp.from_dataset([{"x": float(k)} for k in range(9)]).enumerate(output_column="row")
    batch = tabular(rows.filter(lambda row: row["x"] > 4), evaluate=True).peek()
    assert batch["numeric"].shape[1] == 1
    assert sorted(batch["row"].tolist())[0] >= 5


def test_many_integers_may_be_numbers_and_a_fit_is_a_file(tmp_path: Path) -> None:
    rows = tp.from_dataset([{"x": 1.0, "y": n * 100_000} for n in range(20)])
    with pytest.raises(tp.DataError, match='or say target="number" to predict them as numbers'):
        tabular(rows, label="y")
    with pytest.raises(
        tp.ConfigError, match=r"got the folder .*: name a file in it, such as .*fit.json"
    ):
        tabular(rows, label="y", target="number", fit=tmp_path)
