"""A row is kept, or in a part, by who it is: whatever else is read, in whatever order, by whomever."""

from __future__ import annotations

import os
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainpipes as tp
from trainpipes.engine.planning.row_names import RowNames, hash_column

PARTS = {"train": 0.8, "valid": 0.15, "test": 0.05}


def write(path: Path, name: str, rows: int = 100, group: int = 17) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"{name}-{n}" for n in range(rows)]
    table = pa.table({"id": names, "user": [f"user {n % 23}" for n in range(rows)]})
    pq.write_table(table, path, row_group_size=group)


@pytest.fixture
def folder(tmp_path):
    for number in range(5):
        write(tmp_path / "data" / "en" / f"part-{number}.parquet", f"en-{number}")
    return tmp_path


def ids(pipe: Any) -> list[str]:
    return [row["id"] for row in pipe]


def parts_of(pipe: tp.Pipeline, **options: Any) -> dict[str, set[str]]:
    return {name: set(ids(part)) for name, part in pipe.split(PARTS, **options).items()}


# Parts


def test_every_row_is_in_just_one_part_and_parts_have_their_sizes(folder):
    rows = tp.list_files(folder / "data").read_parquet()
    parts = parts_of(rows)
    assert sum(map(len, parts.values())) == 500
    assert set.union(*parts.values()) == set(ids(rows))
    for name, fraction in PARTS.items():
        spread = (500 * fraction * (1 - fraction)) ** 0.5
        assert abs(len(parts[name]) - 500 * fraction) < 5 * spread


def test_files_that_come_and_go_move_no_row_of_the_others(folder):
    whole = parts_of(tp.list_files(folder / "data").read_parquet())
    os.remove(folder / "data" / "en" / "part-1.parquet")
    write(folder / "data" / "en" / "part-03.parquet", "more", rows=71)
    write(folder / "data" / "aa" / "part-0.parquet", "aa", rows=50)
    changed = parts_of(tp.list_files(folder / "data").read_parquet())
    gone = {f"en-1-{n}" for n in range(100)}
    for name, before in whole.items():
        assert {row for row in changed[name] if row.startswith("en-")} == before - gone


def test_a_glob_in_other_folders_asks_from_before_its_first_wildcard(folder):
    one = parts_of(tp.list_files(folder / "data" / "*" / "*.parquet").read_parquet())
    write(folder / "data" / "aa" / "part-0.parquet", "aa", rows=50)
    two = parts_of(tp.list_files(folder / "data" / "*" / "*.parquet").read_parquet())
    assert all(one[name] <= two[name] for name in one)


def test_files_of_the_same_name_in_several_folders_are_told_apart(tmp_path):
    for number in range(40):
        write(tmp_path / f"day={number}" / "part.parquet", str(number), rows=5)
    parts = parts_of(tp.list_files(tmp_path).read_parquet())
    kept = {
        tuple(sorted(row.split("-")[1] for row in parts["train"] if row.startswith(f"{d}-")))
        for d in range(40)
    }
    assert len(kept) > 5


def test_where_the_folder_lies_has_no_part_in_it(folder, monkeypatch):
    before = parts_of(tp.list_files(folder / "data").read_parquet())
    os.rename(folder / "data", folder / "moved")
    assert parts_of(tp.list_files(folder / "moved").read_parquet()) == before
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    for moved in ("moved/*/*.parquet", "~/moved", f"file://{folder}/moved"):
        assert parts_of(tp.list_files(moved).read_parquet()) == before, moved


@pytest.mark.parametrize("below", ["", "*.bin", "**"])
def test_a_file_that_comes_beside_the_only_one_moves_none_of_its_rows(below, tmp_path):
    """Memory maps: of bare numbers, in a folder or by a glob."""
    folder = tmp_path / "ids"
    (folder / "en").mkdir(parents=True)
    np.arange(400, dtype=np.uint16).tofile(folder / "en" / "a.bin")
    asked = folder / "en" if below != "**" else folder

    def firsts() -> list[int]:
        rows = tp.from_memmap(asked / below, dtype="uint16", length=4).sample(0.5)
        return [int(row["input_ids"][0]) for row in rows]

    before = firsts()
    (folder / "de").mkdir()
    for path in (folder / "de" / "a.bin", folder / "en" / "b.bin"):
        (1000 + np.arange(400, dtype=np.uint16)).tofile(path)
    assert [n for n in firsts() if n < 1000] == before
    assert max(firsts()) >= 1000


@pytest.mark.parametrize("read", ["read_images", "read_bytes"])
def test_rows_that_are_files_stay_in_their_parts_by_their_paths(read, tmp_path):
    def kept() -> set[str]:
        rows = getattr(tp.list_files(tmp_path), read)()
        return {row["path"] for row in rows.split(PARTS, key="path")["train"]}

    for n in range(10, 40):
        (tmp_path / "cat").mkdir(exist_ok=True)
        (tmp_path / "cat" / f"{n}.png").write_bytes(b"...")
    before = kept()
    (tmp_path / "cat" / "0.png").write_bytes(b"...")
    assert kept() - {str(tmp_path / "cat" / "0.png")} == before


def test_a_state_of_the_only_map_of_a_glob_says_its_name(tmp_path):
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "a.bin")
    states = {
        path: tp.from_memmap(tmp_path / path, dtype="uint16", length=4).batch(4).state_at(3)
        for path in ("a.bin", "*.bin")
    }
    with pytest.raises(tp.StateError, match="data/names: saved null, now"):
        tp.from_memmap(tmp_path / "*.bin", dtype="uint16", length=4).batch(4).load_state_dict(
            states["a.bin"]
        )
    os.rename(tmp_path / "a.bin", tmp_path / "b.bin")
    tp.from_memmap(tmp_path / "b.bin", dtype="uint16", length=4).batch(4).load_state_dict(
        states["a.bin"]
    )


def test_row_groups_orders_epochs_and_topologies_have_no_part_in_it(folder):
    rows = tp.list_files(folder / "data").read_parquet()
    expected = parts_of(rows)
    for n in range(5):
        write(folder / "data" / "en" / f"part-{n}.parquet", f"en-{n}", group=50)
    rows = tp.list_files(folder / "data").read_parquet()
    for name, part in rows.split(PARTS).items():
        dealt = part.sharding_filter(4)
        below = rows.shuffle(50).split(PARTS)[name]
        for pipe in (part.shuffle(40, seed=2), dealt.shuffle(9), below, part.sharding_filter(12)):
            for _ in range(2):
                assert sorted(ids(pipe)) == sorted(expected[name])
    workers = tp.Loader(dealt.batch(8), num_workers=2)
    assert sorted(row["id"] for batch in workers for row in batch) == sorted(expected[name])


def test_rows_of_one_key_stay_together_wherever_they_are(folder):
    rows = tp.list_files(folder / "data").read_parquet()
    users = {
        name: {row["user"] for row in part}
        for name, part in rows.split({"a": 0.5, "b": 0.5}, key="user").items()
    }
    assert not users["a"] & users["b"]
    assert len(users["a"] | users["b"]) == 23
    table = tp.from_arrow(pa.table({"user": [f"user {n}" for n in range(23)]}))
    tensors = {row["user"] for row in table.split({"a": 0.5, "b": 0.5}, key="user")["a"]}
    assert tensors == users["a"]  # also in other data
    both = parts_of(rows, key=["user", "id"])
    assert both != parts_of(rows, key=["id", "user"])
    assert sum(map(len, both.values())) == 500


# Samples


@settings(max_examples=25)
@given(low=st.floats(0, 1), high=st.floats(0, 1), seed=st.integers(0, 5))
def test_a_smaller_sample_is_part_of_a_larger_one(low, high, seed):
    low, high = sorted((low, high))
    rows = tp.from_tensors(x=np.arange(400))
    less = {int(row["x"]) for row in rows.sample(low, seed=seed)}
    more = {int(row["x"]) for row in rows.sample(high, seed=seed)}
    assert less <= more
    assert abs(len(more) - 400 * high) < 60


def test_all_and_nothing_can_be_asked_for():
    rows = tp.from_tensors(x=np.arange(100))
    assert len(list(rows.sample(1))) == 100
    assert list(rows.sample(0)) == []
    assert list(rows.split({"all": 1})) == ["all"]
    assert len(list(rows.split({"all": 1})["all"])) == 100


def test_seeds_and_stages_choose_independently():
    rows = tp.from_tensors(x=np.arange(10_000))
    parts = rows.sample(0.5), rows.sample(0.5, seed=1), rows.split({"a": 0.5, "b": 0.5})["a"]
    chosen = [np.array([int(row["x"]) for row in part]) for part in parts]
    for one, other in combinations(chosen, 2):
        assert abs(len(np.intersect1d(one, other)) - 2500) < 300


def test_choices_do_not_follow_row_numbers():
    kept = np.zeros(100_000, dtype=bool)
    kept[[int(r["x"]) for r in tp.from_tensors(x=np.arange(100_000)).sample(0.5)]] = True
    for period in (2, 3, 7, 64, 1000):
        means = kept[: 100_000 // period * period].reshape(-1, period).mean(axis=0)
        spread = 0.5 / (100_000 // period) ** 0.5
        assert np.abs(means - 0.5).max() < 5.5 * spread
    assert abs(np.corrcoef(kept[:-1], kept[1:])[0, 1]) < 0.02


# Hashes


GOLDEN = {
    "int": pa.array([0, 1, -1, 2**62]),
    "uint": pa.array([0, 2**64 - 1], pa.uint64()),
    "float": pa.array([0.0, 1.5, float("inf")]),
    "bool": pa.array([False, True]),
    "text": pa.array(
        ["", "a", "12345678", "123456789", "é", "a much longer key, of several words"]
    ),
    "bytes": pa.array([b"", b"\0", b"\0\0", b"abc"]),
    "decimal": pa.array([Decimal("1.50")]),
    "date": pa.array([1, 20_000], pa.int32()).cast(pa.date32()),
    "timestamp": pa.array([1, 10**15]).cast(pa.timestamp("us")),
}


def test_hashes_are_those_that_earlier_versions_gave(golden: Any):
    found: dict[str, Any] = {kind: hash_column(array).tolist() for kind, array in GOLDEN.items()}
    names = RowNames(np.array([0, 4, 10]), ["", "en/part-0.parquet", "é"])
    found["rows"] = names.hashes(np.array([0, 3, 4, 9, 10, 10**12])).tolist()
    rows = tp.from_tensors(x=np.arange(60))
    found["sample(0.2)"] = [int(row["x"]) for row in rows.sample(0.2)]
    found["sample(0.2, seed=7)"] = [int(row["x"]) for row in rows.sample(0.2, seed=7)]
    found["split valid"] = [int(row["x"]) for row in rows.split(PARTS)["valid"]]
    weighed = rows.sample_by("x", largest=60)
    for epoch in range(2):
        found[f"sample_by, epoch {epoch}"] = [int(row["x"]) for row in weighed]
    golden("row_hashes.json", found)


def test_a_value_has_one_hash_whatever_its_type_and_chunks():
    for kinds in ([pa.int8(), pa.int64(), pa.uint16()], [pa.float32(), pa.float64()]):
        assert len({hash_column(pa.array([7], kind)).item() for kind in kinds}) == 1
    text = ["a", "bb", "a" * 20, ""]
    kinds = [pa.string(), pa.large_string(), pa.binary(), pa.string_view()]
    kinds.append(pa.dictionary(pa.int32(), pa.string()))
    found = {tuple(hash_column(pa.array(text, pa.string()).cast(k)).tolist()) for k in kinds}
    found.add(tuple(hash_column(pa.chunked_array([text[:1], [], text[1:]])).tolist()))
    found.add(tuple(hash_column(pa.array(["x", *text, "y"])[1:5]).tolist()))
    assert len(found) == 1
    assert hash_column(pa.array([0.0])) == hash_column(pa.array([-0.0]))


@given(st.lists(st.binary(max_size=40), unique=True, max_size=60))
def test_different_texts_have_different_hashes_and_neighbors_have_no_say(values):
    found = hash_column(pa.array(values, pa.binary())).tolist()
    assert len(set(found)) == len(values)
    for value, number in zip(values, found, strict=True):
        assert hash_column(pa.array([value])).item() == number


# Bad input


def test_a_key_of_intervals_is_refused():
    times = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
    with pytest.raises(tp.SchemaError, match="'x' is month_day_nano_interval, and a key is text,"):
        list(tp.from_arrow(pa.table({"x": times})).sample(0.5, key="x"))


def held_out(seed: int = 0) -> tp.Pipeline:
    rows = tp.from_arrow(pa.table({"x": range(1000)}))
    return rows.split({"train": 0.6, "rest": 0.4}, seed=seed)["rest"]


HALVES = {"a": 0.5, "b": 0.5}


def mixed(source: tp.Pipeline) -> tp.Pipeline:
    return tp.mix({"one": source, "two": held_out(seed=3)}, weights={"one": 1, "two": 1})


AGAIN = {
    "parts of a part": lambda seed: held_out().split(HALVES, seed=seed)["b"],
    "a sample of a sample": lambda seed: held_out().sample(0.5).shuffle(9).sample(0.5, seed=seed),
    "by one key": lambda seed: held_out().sample(0.5, key="x").sample(0.5, key=["x"], seed=seed),
    "parts of a mix": lambda seed: mixed(held_out()).split(HALVES, seed=seed)["a"],
    "parts of a mix of mixes": lambda seed: mixed(mixed(held_out())).split(HALVES, seed=seed)["a"],
}


@pytest.mark.parametrize("kind", AGAIN)
def test_rows_that_are_chosen_are_chosen_from_again_by_another_seed_only(kind):
    with pytest.raises(tp.ConfigError, match=r"draws the same number for a row: .* such as seed=1"):
        AGAIN[kind](0)
    assert AGAIN[kind](1).batch(1)


def test_a_split_of_a_part_has_the_shares_that_it_is_given():
    parts = held_out().split({"valid": 0.5, "test": 0.5}, seed=1)
    valid, test = ({row["x"] for row in part} for part in parts.values())
    assert valid | test == {row["x"] for row in held_out()}
    assert not valid & test
    assert abs(len(valid) - len(test)) < 100
    by_key = held_out().split({"valid": 0.5, "test": 0.5}, key="x")
    assert abs(len(list(by_key["valid"])) - len(list(by_key["test"]))) < 100
    assert abs(len(list(held_out().sample(0.5))) - 200) < 50


def test_a_state_of_another_part_or_of_the_same_part_cut_elsewhere_is_refused(folder):
    rows = tp.read_parquet(folder / "data").shuffle(20)

    def part(name: str, **parts: float) -> tp.Pipeline:
        return rows.split(parts)[name].batch(4)

    state = part("a", a=0.5, b=0.5).state_at(3)
    with pytest.raises(tp.StateError, match='stages/split/part: saved "a", now "b"'):
        part("b", a=0.5, b=0.5).load_state_dict(state)
    with pytest.raises(tp.StateError, match=r"stages/split/from: saved 0.0, now 0.5"):
        part("a", b=0.5, a=0.5).load_state_dict(state)
    part("a", a=0.5, c=0.25, d=0.25).load_state_dict(state)


# By weights


def weighed(count: int = 40_000) -> tp.Pipeline:
    rng = np.random.default_rng(4)
    return tp.from_tensors(
        x=np.arange(count), w=rng.random(count) * 3, c=np.arange(count) % 10 == 0
    )


def test_a_row_is_kept_as_often_as_its_weight_says() -> None:
    pipe = weighed(2000).sample_by("w", largest=3).batch(2000).collate()
    kept, epochs = np.zeros(2000), 60
    for _ in range(epochs):
        (batch,) = pipe
        kept[batch["x"].numpy()] += 1
    shares = weighed(2000).batch(2000).collate().peek()["w"].numpy() / 3
    spread = (shares * (1 - shares) / epochs) ** 0.5 + 1e-9
    assert np.abs((kept / epochs - shares) / spread).max() < 5
    assert abs((kept / epochs - shares).mean()) < 0.005
    assert (
        abs(np.corrcoef(kept[:-1] - shares[:-1] * epochs, kept[1:] - shares[1:] * epochs)[0, 1])
        < 0.1
    )


def test_classes_are_kept_by_their_weights_over_the_largest() -> None:
    (batch,) = weighed().sample_by("c", {True: 8, False: 2}).batch(40_000).collate()
    rare = int(batch["c"].sum())
    assert rare == 4000
    assert abs(len(batch["c"]) - rare - 9000) < 5 * (36_000 * 0.25 * 0.75) ** 0.5
    (batch,) = weighed().sample_by("c", {True: 1, False: 0}).batch(40_000).collate()
    assert batch["c"].all()


def test_each_epoch_draws_anew_and_places_ranks_and_shuffles_do_not_matter(folder: Path) -> None:
    rows = tp.list_files(folder / "data").read_parquet().with_columns(
        lambda columns: {"w": [0.5] * len(columns["id"])}, format="numpy"
    )  # fmt: skip
    plain = rows.sample_by("w")
    epochs = [set(ids(plain)) for _ in range(2)]
    assert 150 < len(epochs[0]) < 350
    assert epochs[0] != epochs[1]
    dealt = rows.sharding_filter(4).shuffle(20, seed=5).sample_by("w")
    before = rows.sample_by("w").sharding_filter(4).shuffle(33, seed=6)
    for pipe in (dealt, before):
        assert [set(ids(pipe)) for _ in range(2)] == epochs
    ranks = [
        rows.sharding_filter(4, tail="uneven").sample_by("w").distributed(rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    assert [set(ids(ranks[0])) | set(ids(ranks[1])) for _ in range(2)] == epochs
    os.remove(folder / "data" / "en" / "part-1.parquet")
    fewer = tp.list_files(folder / "data").read_parquet().with_columns(
        lambda columns: {"w": [0.5] * len(columns["id"])}, format="numpy"
    ).sample_by("w")  # fmt: skip
    assert set(ids(fewer)) == {row for row in epochs[0] if not row.startswith("en-1-")}


def test_how_many_rows_come_is_an_estimate_and_said() -> None:
    pipe = (
        weighed().sharding_filter(4).shuffle(500).sample_by("w", largest=3, expected=0.5).batch(10)
    )
    assert "about 50.0% of the rows are expected" in str(pipe.explain())
    assert "about 2,0" in dict(pipe.explain().lines)["an epoch"]
    with pytest.raises(TypeError, match="how many rows sample_by"):
        len(pipe)
    assert tp.Loader(pipe).estimate_len() == pytest.approx(len(list(pipe)), rel=0.05)
    said = pipe.stats(100).counts["sample_by"]
    assert "of the rows are expected" in said
    assert "kept " in said
    counts = weighed().stats(0, labels="c").labels["c"]
    by_class = weighed().sample_by("c", {True: 1, False: 0.5}, expected=counts)
    assert "about 55.0% of the rows" in str(by_class.explain())
    unknown = weighed().sharding_filter(4).shuffle(500).sample_by("w", largest=3).batch(10)
    assert "known only at the end" in dict(unknown.explain().lines)["an epoch"]
    unknown.load_state_dict(pipe.state_dict() or {})  # what is expected has no part in a state


@pytest.mark.parametrize(
    ("column", "options", "error", "said"),
    [
        ([0.5, None], {}, tp.DataError, r"is null or NaN, and weights are from 0 to 1.*row 1\)"),
        ([0.5, float("nan")], {}, tp.DataError, r"is null or NaN.*row 1\)"),
        ([0.5, 2.0], {}, tp.DataError, r"is 2.0, and weights are from 0 to 1: divide by.*row 1\)"),
        ([0.5, -1.0], {"largest": 3}, tp.DataError, r"is -1.0.*row 1\)"),
        ([0.5, float("inf")], {"largest": 3}, tp.DataError, r"is inf.*row 1\)"),
        (["a", "b"], {}, tp.SchemaError, "must hold numbers, got string"),
        (["a", "bb"], {"weights": {"a": 1, "b": 2}}, tp.DataError,
            r"the class 'bb', which weights do not have.*they have \['a', 'b'\]: give it one.*row 1\)"),
        (["a", None], {"weights": {"a": 1}}, tp.DataError, r"holds a null.*row 1\)"),
        ([["a"], ["b"]], {"weights": {"a": 1, "b": 1}}, tp.SchemaError, "one class a row"),
    ],
)  # fmt: skip
def test_a_weight_that_is_none_is_named(column: Any, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        list(tp.from_arrow(pa.table({"w": column})).sample_by("w", **options))


def test_weights_choose_rows_before_they_are_batched_or_kept() -> None:
    rows = weighed(100)
    with pytest.raises(
        tp.ConfigError, match=r"sample_by.* chooses single rows: put it before batch"
    ):
        list(rows.batch(4).sample_by("w", largest=3))
    table = tp.from_arrow(pa.table({"w": [0.5] * 50}))
    with pytest.raises(tp.ConfigError, match="gives other rows in every epoch, and cache"):
        list(table.sample_by("w").cache())
    with pytest.raises(tp.ConfigError, match="give one of the two another seed"):
        list(rows.sample_by("w", largest=3).sample_by("c", {True: 1, False: 1}))
