"""``stats()`` measures what training is given, and starts no epoch."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

import trainpipes as tp

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def documents(lengths=tuple(LENGTHS)):
    return tp.from_arrow(pa.table({"input_ids": [[7] * length for length in lengths]}))


def source(count, length=1):
    return documents([length] * count)


def test_padding_is_what_stands_beside_the_tokens():
    pipe = documents().batch(4).pad_collate()
    before = pipe.state_dict()
    found = pipe.stats()
    assert found.batches == 3
    assert found.padding.cells == 4 * 4 + 4 * 9 + 2 * 5
    assert found.padding.cells - found.padding.padding == sum(LENGTHS)
    assert found.padding.share == pytest.approx(1 - sum(LENGTHS) / 62)
    assert "37.10% of 62 cells" in str(found)
    assert found.packing is found.mixture is None
    assert pipe.state_dict() == before


def test_so_many_batches_are_looked_at_over_all_ranks():
    pipe = documents(LENGTHS * 40).sharding_filter(4).batch(4).pad_collate()
    found = pipe.stats(7)
    assert found.batches == 7
    assert "the first 7 of an epoch" in str(found)
    assert pipe.distributed(rank=1, world_size=2).stats(7).to_dict() == found.to_dict()


def test_of_batches_without_a_mask_one_is_made():
    made = []
    pipe = tp.from_tensors(x=range(100)).batch(4).collate().map(lambda b: made.append(b) or b)
    found = pipe.stats()
    assert len(made) == 1
    assert (found.batches, found.padding, found.packing) == (0, None, None)
    assert found.shuffle.neighbors_kept == 1


def test_of_mixed_batches_those_with_a_mask_are_measured():
    masked = documents().batch(4).pad_collate()
    sources = {"plain": tp.from_tensors(x=range(30)).batch(2).collate(), "masked": masked}
    found = tp.mix(sources).stats()
    assert (found.batches, found.padding) == (3, masked.stats().padding)


def test_an_empty_epoch_has_stats_too():
    found = documents().skip(10).batch(4).pad_collate().stats()
    assert (found.batches, found.padding) == (0, None)
    assert "0 of" in str(found)


@pytest.mark.parametrize("batched", [False, True])
def test_packed_rows_are_their_documents_and_what_is_empty(batched):
    pipe = documents().pack(10, method="first_fit")
    found = (pipe.batch(2).pad_collate() if batched else pipe).stats().packing
    assert found.documents == len(LENGTHS)
    assert found.empty == found.rows * 10 - sum(LENGTHS)
    assert found.max_length == 10
    assert found.share == found.empty / (found.rows * 10)
    assert f"{found.rows} rows of 10 tokens" in str(found)


@pytest.mark.parametrize("shards", [1, 6])
def test_a_mixture_counts_what_training_is_given(shards):
    weights = {"web": 5, "code": 2, "books": 1}
    sources = {name: source(50) for name in weights}
    mixed = tp.mix(sources, weights=weights, stop="repeat", output_column="source")
    pipe = mixed.sharding_filter(shards).batch(4)
    found = pipe.stats(24).mixture
    batches = iter(pipe)
    given = [row["source"] for _ in range(24) for row in next(batches)]
    assert found.rows == {name: given.count(name) for name in weights}
    assert found.targets == {"web": 0.625, "code": 0.25, "books": 0.125}
    assert sum(found.shares.values()) == pytest.approx(1)


def test_a_mixture_counts_tokens_where_the_mix_does():
    sources = {"short": source(100, 2), "long": source(100, 8)}
    mixed = tp.mix(sources, weights={"short": 1, "long": 1}, weight_by="tokens", stop="repeat")
    found = mixed.batch(10).stats(10).mixture
    assert found.unit == "tokens"
    assert found.amounts == {"short": 160, "long": 160}
    assert found.rows == {"short": 80, "long": 20}


def test_targets_follow_a_schedule():
    steps = [(0, {"a": 1, "b": 0}), (100, {"a": 0, "b": 1})]
    mixed = tp.mix({"a": source(10), "b": source(10)}, schedule=steps, stop="repeat")
    found = mixed.batch(10).stats(40).mixture
    assert found.targets == {"a": 0.25, "b": 0.75}
    assert found.rows == {"a": 100, "b": 300}


def test_a_mixture_ends_with_its_epoch_and_is_by_sizes():
    found = tp.mix({"a": source(30), "b": source(10)}).stats().mixture
    assert found.rows == {"a": 30, "b": 10}
    assert found.targets == {"a": 0.75, "b": 0.25}
    assert len(str(found).splitlines()) == 3


def test_a_mix_in_a_mix_is_one_source():
    inner = tp.mix({"x": source(5), "y": source(5)})
    found = tp.mix({"in": inner, "out": source(10)}, weights={"in": 1, "out": 1}).stats()
    assert found.mixture.rows == {"in": 10, "out": 10}
    assert found.shuffle is None


@pytest.mark.parametrize("read", [tp.read_images, tp.read_bytes])
def test_labels_of_files_that_are_rows_are_counted(read, tmp_path):
    for name in ("ant/0.png", "cat/0.png", "cat/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"...")
    rows = read(tmp_path, labels="folder")
    assert rows.stats(0, labels=["label", "class"]).labels == {
        "label": {0: 1, 1: 2}, "class": {"ant": 1, "cat": 2},
    }  # fmt: skip
    assert rows.shuffle(9).batch(2).stats(0, labels="class").labels["class"]["cat"] == 2


def test_labels_are_counted_over_all_rows_and_can_be_asked_for_alone():
    rows = tp.from_dataset([{"x": n, "label": "ab"[n % 3 > 0]} for n in range(999)])
    found = rows.shuffle(9).batch(2).stats(0, labels=["label", "x"])
    assert found.labels["label"] == {"a": 333, "b": 666}
    assert len(found.labels["x"]) == 999
    assert (found.batches, found.shuffle) == (0, None)
    assert "label, over all rows: 'a': 333, 'b': 666" in str(found)
    assert "and 987 more" in str(found)


def test_a_column_with_the_name_of_one_that_was_left_out_is_counted():
    rows = tp.from_arrow(
        pa.table({"kind": ["b", "a", "b"], "label": [1, 2, 3], "labels": [4, 5, 6]})
    )
    chosen = rows.select("kind").rename({"kind": "label"})
    assert chosen.stats(0, labels="label").labels["label"] == {"a": 1, "b": 2}
    encoded = chosen.encode_labels(classes=["a", "b"])
    assert encoded.stats(0, labels="labels").labels["labels"] == {0: 1, 1: 2}
    swapped = rows.rename({"label": "kind", "kind": "label"})
    assert swapped.stats(0, labels=["label", "kind"]).labels == {
        "label": {"a": 1, "b": 2}, "kind": {1: 1, 2: 1, 3: 1},
    }  # fmt: skip


def test_what_is_kept_is_made_once_for_the_labels_and_for_training(tmp_path):
    calls = []

    def labelled(row):
        calls.append(row["x"])
        return {**row, "label": row["x"] % 3}

    rows = tp.from_arrow(pa.table({"x": range(30)})).map(labelled, version="1").cache(tmp_path)
    list(rows.take(1))  # finds the types
    before = len(calls)
    assert rows.stats(0, labels="label").labels["label"] == {0: 10, 1: 10, 2: 10}
    assert rows.fit_columns(["x"]).numbers["x"]["mean"] == 14.5
    assert len(list(rows.shuffle(5))) == 30
    assert len(calls) - before <= 30


def test_a_record_of_it_is_plain_json():
    mixed = tp.mix({"a": documents(), "b": documents()}).pack(10).batch(2).pad_collate()
    rows = tp.from_dataset([{"label": n % 2} for n in range(9)]).shuffle(4)
    for found in (mixed.stats(), rows.stats(labels="label")):
        record = found.to_dict()
        assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["labels"] == {"label": {"0": 5, "1": 4}}
    assert record["shuffle"]["rows"] == 9


@pytest.mark.parametrize("batches", [-1, 2.5, "many"])
def test_a_number_of_batches_is_whole(batches):
    with pytest.raises(tp.ConfigError, match=r"stats\(batches\)"):
        documents().stats(batches)
