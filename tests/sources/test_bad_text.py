"""Text that is not UTF-8: one error wherever it is first decoded, or replaced by choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import trainpipes as tp
from trainpipes import Pipeline
from trainpipes.errors import ConfigError, StateError, UnreadableError

#: Rows, rows in a row group, and the row that is not UTF-8 in each column.
ROWS, GROUP, BAD, BAD_NESTED = 200, 50, 130, 171
LATIN = "café résumé".encode("latin-1")


def written(row: int) -> bytes:
    return LATIN if row == BAD else f"row {row} é".encode()


def as_text(values: list[bytes]) -> pa.Array:
    """Bytes, called text without a look at them."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "rows.parquet"
    chats = [LATIN if row == BAD_NESTED else b"hello" for row in range(ROWS)]
    turns = pa.StructArray.from_arrays([as_text(chats)], ["content"])
    columns = {
        "id": list(range(ROWS)),
        "text": as_text([written(row) for row in range(ROWS)]),
        "chat": pa.ListArray.from_arrays(list(range(ROWS + 1)), turns),
    }
    pq.write_table(pa.table(columns), path, row_group_size=GROUP)
    return path


def same(row: Any) -> Any:
    return row


def anything(row: Any) -> bool:
    return True


STAGES: dict[str, Callable[[Pipeline], Pipeline]] = {
    "rows": lambda p: p,
    "batches": lambda p: p.batch(7),
    "map": lambda p: p.map(same),
    "workers of map": lambda p: p.map(same, num_workers=2),
    "flat_map": lambda p: p.flat_map(lambda row: [row]),
    "filter": lambda p: p.filter(anything),
    "expression": lambda p: p.filter(pc.utf8_upper(pc.field("text")) != ""),
    "bytes": lambda p: p.tokenize("bytes").batch(4).pad_collate(),
    "callable": lambda p: p.tokenize(len_tokens).batch(4).pad_collate(value=0),
    "template": lambda p: p.tokenize("bytes", template="say {text}").batch(4).pad_collate(),
    "numpy": lambda p: p.map_batches(lambda c: c, format="numpy"),
    "collate": lambda p: p.batch(4).collate(),
    "pad_collate": lambda p: p.batch(4).pad_collate(),
    "shuffle": lambda p: p.sharding_filter(num_shards=2).shuffle(buffer_size=60).map(same),
    "map before shuffle": lambda p: p.map(same).sharding_filter(num_shards=2).shuffle(60),
    "mix": lambda p: tp.mix({"a": p}).map(same),
}


def len_tokens(texts: list[str]) -> list[list[int]]:
    return [[len(text)] for text in texts]


def refused(read: Callable[[], Any]) -> UnreadableError:
    with pytest.raises(
        UnreadableError, match="column 'text' holds text that is not UTF-8"
    ) as caught:
        read()
    return caught.value


@pytest.mark.parametrize("name", STAGES)
def test_text_that_is_not_utf8_is_one_error_wherever_it_is_decoded(path: Path, name: str) -> None:
    pipe = STAGES[name](tp.list_files(path).read_parquet(columns=["id", "text"], index=False))
    error = refused(lambda: list(pipe))
    assert (error.path, error.row_group, error.row) == (str(path), BAD // GROUP, BAD)
    assert repr(LATIN)[1:] in str(error)
    assert 'read_parquet(errors="replace")' in str(error)
    assert list(STAGES[name](replacing(path, ["id", "text"])))


def test_text_in_lists_and_structs_is_found_in_its_row(path: Path) -> None:
    pipe = tp.list_files(path).read_parquet(columns=["chat"], index=False)
    with pytest.raises(
        UnreadableError, match="column 'chat' holds text that is not UTF-8"
    ) as caught:
        list(pipe.map(same))
    assert caught.value.row == BAD_NESTED


@pytest.mark.usefixtures("failed_workers_let_go")
def test_the_error_is_the_same_with_threads_workers_and_after_a_resume(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipe() -> Pipeline:
        return tp.list_files(path).read_parquet(columns=["text"], index=False).map(same).batch(10)

    expected = str(refused(lambda: list(pipe())))
    resumed = pipe()
    loader = tp.Loader(resumed)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    del batches
    again = tp.Loader(pipe())
    again.load_state_dict(state)
    assert str(refused(lambda: list(again))) == expected
    monkeypatch.setenv("TRAINPIPES_THREADS", "0")
    assert str(refused(lambda: list(pipe()))) == expected
    assert expected in str(refused(lambda: list(tp.Loader(pipe(), num_workers=1))))
    assert expected in str(
        refused(lambda: list(DataLoader(pipe(), batch_size=None, num_workers=1)))
    )


def test_columns_of_which_nothing_is_decoded_may_hold_any_bytes(path: Path) -> None:
    rows = tp.list_files(path).read_parquet(index=False)
    found = list(rows.map_batches(lambda t: t.select(["id"])))
    assert [row["id"] for row in found] == list(range(ROWS))


def test_statistics_that_are_not_utf8_refuse_no_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": as_text([b"\xff first", b"a"] * 20), "x": [1] * 40}), path)
    pipe = tp.list_files(path).read_parquet(index=False)
    assert "40" in str(pipe.explain())
    assert len(list(tp.list_files(path).read_parquet(columns=["x"], index=False))) == 40
    assert next(iter(pipe.map_batches(lambda t: t.select(["x"])))) == {"x": 1}


def test_an_error_of_a_function_about_other_bytes_stays_what_it_is(path: Path) -> None:
    def decode(row: Any) -> Any:
        return bytes([255]).decode()

    with pytest.raises(UnicodeDecodeError):
        list(tp.list_files(path).read_parquet(columns=["id"], index=False).map(decode))


# errors="replace"


def replacing(path: Path, columns: list[str] | None = None) -> Pipeline:
    return tp.list_files(path).read_parquet(columns, index=False, errors="replace")


def test_text_is_replaced_as_python_does_it_and_other_text_stays(path: Path) -> None:
    rows = list(replacing(path))
    assert [row["text"] for row in rows] == [
        written(row).decode("utf-8", "replace") for row in range(ROWS)
    ]
    said = [row["chat"][0]["content"] for row in rows]
    assert said[BAD_NESTED] == LATIN.decode("utf-8", "replace")
    assert {text for n, text in enumerate(said) if n != BAD_NESTED} == {"hello"}


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(), pa.large_string(), pa.list_(pa.string()), pa.large_list(pa.string()),
        pa.list_(pa.string(), 2), pa.map_(pa.string(), pa.string()),
        pa.struct([("a", pa.string()), ("b", pa.list_(pa.struct([("c", pa.large_string())])))]),
    ],
    ids=str,
)  # fmt: skip
def test_text_of_every_shape_is_replaced_and_nulls_stay(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "rows.parquet"

    def value(shape: pa.DataType, text: str) -> Any:
        if pa.types.is_struct(shape):
            fields = [shape.field(n) for n in range(shape.num_fields)]
            return {field.name: value(field.type, text) for field in fields}
        if pa.types.is_map(shape):
            return [(text, "x")]
        if pa.types.is_nested(shape):
            return [value(shape.value_type, text), value(shape.value_type, "fine")]
        return text

    rows = [value(kind, "BAD!") if n % 3 else None for n in range(40)]
    pq.write_table(
        pa.table({"x": pa.array(rows, kind)}), path, compression="none", use_dictionary=False
    )
    path.write_bytes(path.read_bytes().replace(b"BAD!", b"B\xffD!"))
    expected = [value(kind, "B�D!") if n % 3 else None for n in range(40)]
    assert [row["x"] for row in replacing(path)] == expected


def test_the_choice_is_part_of_a_state_and_the_default_is_not(path: Path) -> None:
    strict = tp.list_files(path).read_parquet(columns=["id"], index=False).batch(4)
    assert "errors" not in str(tp.Loader(strict).state_dict())
    assert "errors" not in repr(strict)
    state = tp.Loader(replacing(path, ["id"]).batch(4)).state_dict()
    with pytest.raises(StateError, match="errors"):
        tp.Loader(strict).load_state_dict(state)


def test_a_cache_keeps_replaced_rows_apart(path: Path, tmp_path: Path) -> None:
    def rows(errors: Any) -> Pipeline:
        files = tp.list_files(path)
        return files.read_parquet(["text"], index=False, errors=errors).cache(tmp_path / "kept")

    assert list(rows("replace"))[BAD]["text"] == LATIN.decode("utf-8", "replace")
    refused(lambda: list(rows("strict")))


def test_errors_is_one_of_two_words(path: Path) -> None:
    with pytest.raises(ConfigError, match='"strict" or "replace", got \'ignore\''):
        tp.list_files(path).read_parquet(errors="ignore")  # type: ignore[arg-type]
