"""What every stage refuses: options that cannot be, rows that do not fit, places where it cannot stand; and
what is not known before."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from every_stage import chat_tokenizer
from mutants import resealed
from trainpipes.config import loads

Make = Callable[[tp.Pipeline], Any]
HUGE = 2**70
#: What an option cannot be that is declared so. None is one more, unless it may be left out.
NEVER: dict[str, list[Any]] = {
    "Count": [0, -1, True, 1.5, "1", HUGE, [1]],
    "Natural": [-1, True, 1.5, "1", HUGE],
    "Cells": [0, True, 2**31],
    "Seed": [True, 1.5, "x", [1]],
    "Share": [-0.1, 1.5, True, "1", [0.5]],
    "PadValue": ["0", True],
    "ColumnName": ["", 5, ["x"]],
    "ColumnNames": ["", [], [""], 3, {"x"}, {"x": 1}],
    "Function": [3, "len"],
    "Schema": [3, ["x"]],
    "Text": [3, b"x"],
    "Size": [0, 2.5, (3, 4, 5), (3, True), "3"],
    "bool": ["yes", 1],
    "Side": ["up", "pre", 1],
    "Method": ["next_fit", 1],
    "Overflow": ["cut"],
    "LongRow": ["drop"],
    "Mode": ["rgb", 3],
    "Interpolation": ["cubic"],
    "Format": ["pandas"],
    "Kind": ["fork"],
    "OnError": ["drop", True],
}
#: A call of each stage with the options that it needs.
CALLS: dict[str, dict[str, Any]] = {
    "audio_info": {}, "decode_audio": {}, "decode_video": {}, "log_mel": {}, "mask_spans": {},
    "add_labels": {}, "batch": {}, "bucket_by_length": {}, "cache": {}, "center_crop": {"size": 2},
    "encode_categories": {"categories": {"x": [1]}},
    "normalize_columns": {"numbers": {"x": {"mean": 0, "std": 1}}}, "sample_by": {"column": "x"},
    "collate": {}, "decode_image": {}, "encode_labels": {"classes": ["a"]}, "enumerate": {},
    "filter": {"predicate": len}, "flat_map": {"fn": list}, "flip": {}, "image_transform": {"transform": len},
    "map": {"fn": len}, "map_batches": {"fn": len}, "mask_tokens": {"mask_token_id": 1}, "normalize": {},
    "pack": {"max_length": 8}, "pad_collate": {}, "random_crop": {"size": 2},
    "random_resized_crop": {"size": 2}, "repeat": {}, "resize": {"size": 2}, "sample": {"fraction": 0.5},
    "sharding_filter": {}, "shuffle": {}, "skip": {"count": 1}, "take": {"count": 1}, "to": {"device": "cpu"},
    "tokenize": {"tokenizer": "bytes"}, "tokenized_by": {"tokenizer": "bytes"},
    "truncate": {"max_length": 2}, "with_columns": {"fn": len},
}  # fmt: skip


def rows(lengths: Any = (1,), **columns: Any) -> tp.Pipeline:
    ids = pa.array([list(range(n)) for n in lengths], pa.list_(pa.int32()))
    return tp.from_arrow(pa.table({"input_ids": ids, **columns}))


def declared(stage: str) -> dict[str, str]:
    """How the options of a stage are declared."""
    parameters = inspect.signature(getattr(tp.Pipeline, stage)).parameters.values()
    return {one.name: str(one.annotation) for one in parameters}


@pytest.mark.parametrize("stage", CALLS)
def test_an_option_is_what_it_is_declared_to_be(stage: str) -> None:
    for option, kind in declared(stage).items():
        parts = kind.split(" | ")
        bad = list(NEVER.get(parts[0], ()))
        if bad and "None" not in parts:
            bad.append(None)
        for value in bad:
            said = rf"^{stage}\({option}\) must (be|name) .*, got "
            with pytest.raises(tp.ConfigError, match=said):
                getattr(rows(), stage)(**{**CALLS[stage], option: value})


async def awaited(row: Any) -> bool:
    return False


def yielded(row: Any) -> Iterator[Any]:
    yield row


class Awaits:
    async def __call__(self, row: Any) -> bool:
        return False


class Yields:
    def __call__(self, row: Any) -> Iterator[Any]:
        yield row


OPTIONS: list[tuple[Make, str]] = [
    (lambda p: p.map(awaited), r"map\(fn\) must be a function without async, got .*awaited.*asyncio\.run"),
    (lambda p: p.filter(partial(awaited)), r"filter\(predicate\) must be a function without async, got"),
    (lambda p: p.batch(2).collate(awaited), r"collate\(fn\) must be a function without async, got"),
    (lambda p: p.map(Awaits()), r"map\(fn\) must be a function without async, got .*Awaits"),
    (lambda p: p.map(Yields()), r"map\(fn\) must be a function that returns, got .*Yields"),
    (lambda p: p.map(yielded), r"map\(fn\) must be a function that returns, got .*yielded.*; flat_map\(fn\)"),
    (lambda p: p.filter(yielded), r"filter\(predicate\) must be a function that returns, got .*yielded"),
    (lambda p: p.batch(4, max_tokens=9), r"batch_size\) must be left out where max_tokens is given, got 4"),
    (lambda p: p.batch(4, max_rows=2), "must be given with max_tokens, got"),
    (lambda p: p.batch(4, column="x"), "must be given with max_tokens, got"),
    (lambda p: p.bucket_by_length(4, max_tokens=9), "must be left out where max_tokens is given, got 4"),
    (lambda p: p.bucket_by_length(4, num_buckets=2, boundaries=[3]), "left out where num_buckets is given"),
    (lambda p: p.bucket_by_length(4, boundaries=[]), r"ascending lengths, each once, got \[\]"),
    (lambda p: p.bucket_by_length(4, boundaries=[3, 3]), r"ascending lengths, each once, got \[3, 3\]"),
    (lambda p: p.bucket_by_length(4, boundaries=[2.5]), r"bucket_by_length\(boundaries\) must be an integer"),
    (lambda p: p.bucket_by_length(4, max_rows=2), "must be given with max_tokens"),
    (lambda p: p.bucket_by_length(max_tokens=4, drop_last=True), "must be given with batch_size"),
    (lambda p: p.pack(0), r"^pack\(max_length\) must be an integer of 1 or more, got 0$"),
    (lambda p: p.pack(2**31), "an integer of 2147483647 or less"),
    (lambda p: p.pack(8, along="weight"), r"pack\(along\) must be a list of column names"),
    (lambda p: p.pack(8, along=["labels"]), r'a column "labels" is packed anyway'),
    (lambda p: p.random_crop(3, fill=256), "of 255 or less"),
    (lambda p: p.random_resized_crop(3, scale=(0, 1)), r"must be \(least, greatest\), above 0 up"),
    (lambda p: p.random_resized_crop(3, ratio=(2, 1)), r"must be \(least, greatest\), above 0, got"),
    (lambda p: p.random_resized_crop(3, scale=0.5), "got 0.5"),
    (lambda p: p.flip(direction="up"), '"horizontal" or "vertical"'),
    (lambda p: p.normalize(std=0), r"normalize\(std\) must be above 0"),
    (lambda p: p.normalize(mean="imagenet"), "a number, or one of each channel"),
    (lambda p: p.normalize(mean=[]), "a number, or one of each channel"),
    (lambda p: p.decode_image(on_error="drop"), '"raise" or "skip"'),
    (lambda p: p.log_mel(pad_seconds=0), "a number of seconds above 0"),
    (lambda p: p.log_mel(hop_length=401), "at most n_fft, 400"),
    (lambda p: p.mask_spans(value="mean"), "must be a number, got 'mean'"),
    (lambda p: p.mask_spans(time_share=1.5), "a number from 0 to 1"),
    (lambda p: p.batch(2).collate(len, ragged="offsets"), r"left out beside a function or a format"),
    (lambda p: p.batch(2).collate(dtype=torch.int64), r"torch.float16, torch.float32 or torch.float64, got"),
    (lambda p: p.batch(2).collate(len, dtype=torch.float32), r"dtype\) must be left out beside a function"),
    (lambda p: p.normalize_columns({}), r"normalize_columns\(numbers\) must be a dict such as"),
    (lambda p: p.normalize_columns({"x": {"mean": 1}}), "with finite numbers, got {'x': {'mean': 1}}; pipe"),
    (lambda p: p.normalize_columns({"x": {"mean": 1, "std": -1}}), "with finite numbers"),
    (lambda p: p.normalize_columns({"x": {"mean": float("nan"), "std": 1}}), "with finite numbers"),
    (lambda p: p.normalize_columns({"x": {"mean": 1, "std": 1}}, nulls="drop"), '"raise", "mean" or "nan"'),
    (lambda p: p.encode_categories({}), r"encode_categories\(categories\) must be a dict of columns"),
    (lambda p: p.encode_categories({"x": "ab"}), r"\(categories\) must be a dict of columns"),
    (lambda p: p.encode_categories({"x": [1.5]}), "values are texts, integers or bools, got 1.5"),
    (lambda p: p.encode_categories({"x": [True, 1]}), r"values that differ, got \[1\]"),
    (lambda p: p.encode_categories({"x": ["a", "a"]}), r"values that differ, got \['a'\]; name each once"),
    (lambda p: p.encode_categories({"x": [2**70]}), "integers of 64 bits"),
    (lambda p: p.batch(2).collate(weights={"a": "b"}), r"collate\(weights\) must be given with ragged"),
    (lambda p: p.batch(2).collate(ragged="offsets", weights=["a"]), "a dict of columns and their weights"),
    (lambda p: p.batch(2).collate(ragged="offsets", weights={"a": "a"}), "columns and their weights"),
    (lambda p: p.pad_collate(lengths=["x"]), "a dict of columns and names"),
    (lambda p: p.pad_collate(mask={"x": "y"}, lengths={"z": "y"}), "another name for each"),
    (lambda p: p.decode_audio(duration=0), "a number of seconds above 0, the name of a column"),
    (lambda p: p.decode_audio(duration={"random_crop": -1}), "a number of seconds above 0"),
    (lambda p: p.decode_audio(start=-0.5), "a number of seconds of 0 or more, or the name of a column"),
    (lambda p: p.decode_video(fps=0), "a number of frames above 0 in a second, got 0"),
    (lambda p: p.decode_video(num_frames=2, fps=1.5), r"\(fps\) must be left out beside num_frames"),
    (lambda p: p.decode_video(frames=[]), "a list of numbers of frames, at least one"),
    (lambda p: p.decode_video(frames=[0], start=1), r"decode_video\(start\) must be left out with frames"),
    (lambda p: p.decode_video(size=(2, 0)), r"decode_video\(size\) must be an integer of 1 or more"),
    (lambda p: p.decode_video(times_column="video"), "a column of its own"),
    (lambda p: p.map(len, method="fork"), r'^map\(method\) must be "thread" or "process", got .fork.$'),
    (lambda p: p.map(len, start_method="magic"), r"map\(start_method\) must be .forkserver., .spawn"),
    (lambda p: p.mask_tokens(random_replace_prob=0.6), "at most 1 together, got \\(0.8, 0.6\\)"),
    (lambda p: p.mask_tokens(), "tell mask_token_id, special_ids, vocab_size, and there is"),
    (lambda p: p.mask_tokens(special_ids=["x"]), r"mask_tokens\(special_ids\) must be an integer"),
    (lambda p: p.add_labels(ignore="x"), "a token id, or several"),
    (lambda p: p.add_labels(ignore=[-1]), "add_labels"),
    (lambda p: p.enumerate("x"), "enumerate"),
    (lambda p: p.tokenize("bytes", add_eos=2**31), r"tokenize\(add_eos\) must be an integer of 2147483647"),
    (lambda p: p.tokenize("bytes", add_eos=-1), "True, False, a token or its id"),
    (lambda p: p.sample_by("x", largest=0), r"sample_by\(largest\) must be a finite number above 0"),
    (lambda p: p.sample_by("x", {}), r"sample_by\(weights\) must be a dict of classes and weights"),
    (lambda p: p.sample_by("x", [1]), "a dict of classes and weights"),
    (lambda p: p.sample_by("x", {"a": 0}), "not all 0"),
    (lambda p: p.sample_by("x", {"a": -1, "b": 1}), "not all 0"),
    (lambda p: p.sample_by("x", {1.5: 1}), "a label must be a text or an integer, got 1.5"),
    (lambda p: p.sample_by("x", {"a": 1}, largest=2), "left out beside weights, got 2"),
    (lambda p: p.sample_by("x", expected=1.5), r"sample_by\(expected\) must be a number from 0 to 1"),
    (lambda p: p.sample_by("x", expected={"a": 1}), "the rows of each class"),
    (lambda p: p.sample_by("x", {"a": 1}, expected={"b": 1}), "of each class, .* with a weight"),
    (lambda p: p.sample_by("x", {"a": 1}, expected={"a": 0}), "of which there are some"),
    (lambda p: p.split({"a": 0.5, "b": 0.4}), "sum to 1, got 0.9"),
    (lambda p: p.split({"a": 0.5, "b": 0.6}), "sum to 1, got 1.1"),
    (lambda p: p.split({"a": 1.0, "b": 0.0}), "'b': 0.0"),
    (lambda p: p.split([0.5, 0.5]), "must be a dict"),
    (lambda p: p.split({}), "must be a dict"),
    (lambda p: p.split({1: 1.0}), "names and fractions"),
    (lambda p: p.batch(1).to("gpu"), 'such as "cuda" or "cuda:1", got \'gpu\''),
    (lambda p: p.batch(1).to(None), "got None"),
]  # fmt: skip


def test_the_largest_id_may_end_a_text() -> None:
    (row,) = tp.from_dataset([{"text": ""}]).tokenize("bytes", add_eos=2**31 - 1)
    assert row["input_ids"].tolist() == [2**31 - 1]


@pytest.mark.parametrize(("make", "message"), OPTIONS, ids=range(len(OPTIONS)))
def test_options_that_cannot_be_are_refused_at_once(make: Make, message: str) -> None:
    with pytest.raises(tp.ConfigError, match=message):
        make(rows())


PLACES: list[tuple[Make, str]] = [
    (lambda p: p.batch(2).pack(8), r"put it before batch\(\)"),
    (lambda p: p.sharding_filter(4).shuffle(4).take(3).pack(8), "would count for each shard alone"),
    (lambda p: p.sharding_filter(4).batch(2).filter(bool).take(3), r"after batch\(\), where no stage drops"),
    (lambda p: p.batch(2).sample(0.5), r"put it before batch\(\)"),
    (lambda p: tp.list_files("x").sample(0.5).read_parquet(), "file paths"),
    (lambda p: p.batch(2).pad_collate().truncate(2), "put it before pad_collate"),
    (lambda p: p.batch(2).pad_collate().flip(), "put it before pad_collate"),
    *((lambda p, step=step: step(p.batch(2)), r"put it before batch\(\)") for step in (
        lambda p: p.truncate(2, on_error="skip"),
        lambda p: p.tokenize("bytes", on_error="skip"),
        lambda p: p.chat_template(chat_tokenizer(), on_error="skip"),
    )),
    (lambda p: p.batch(2).batch(max_tokens=2), "a pipeline has one"),
    (lambda p: p.shuffle(4).shuffle(scope="global"), r"has ordered or made them already: use shuffle\("),
    (lambda p: p.sharding_filter(2).batch(2).take(3).shuffle(2), "none behind it groups or shuffles them"),
    (lambda p: p.batch(2).bucket_by_length(2), "a pipeline has one"),
    # Where an option of the reader drops rows, no stage of the chain can be moved.
    *((step, r"leave out the option of read_arrow\(\) that drops rows, or (put|number)") for step in (
        lambda p: tp.read_arrow("x", on_error="skip").enumerate(),
        lambda p: tp.read_arrow("x", on_error="skip").take(3).shuffle(4),
        lambda p: tp.read_arrow("x", on_error="skip").take(3).sharding_filter(4),
    )),
    (lambda p: tp.read_arrow("x", on_error="skip").shuffle(sampler=[1]), "option of read_arrow"),
    *((lambda p, step=step: step(p.batch(2).to("cpu")), r"after to\(.cpu.\) .*put it before to") for step in (
        lambda p: p.map(len),
        lambda p: p.filter(bool),
        lambda p: p.collate(list),
    )),
    (lambda p: tp.read_parquet("x", filter=[["x", ">", 1]]).enumerate(), r"put filter\(\) after enum"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), PLACES, ids=range(len(PLACES)))
def test_a_place_where_a_stage_cannot_stand_is_refused(make: Make, message: str) -> None:
    with pytest.raises(tp.ConfigError, match=message):
        list(make(rows([1, 2])))


def of(step: Make, *messages: tuple[Any, str]) -> list[tuple[Any, Make, str]]:
    """The columns that a stage refuses, and what it says of them."""
    return [(data, step, message) for data, message in messages]


PIXELS = np.zeros((3, 4, 4), np.uint8)
#: Rows that a stage refuses, the number of the one that is named, if any is, and what is said.
ROWS: list[tuple[Any, Make, str]] = [
    *of(
        lambda p: p.batch(max_tokens=8),
        ({"ids": [[1]]}, "no column 'input_ids'"),
        ({"input_ids": ["a"]}, "how long a row is.*got string"),
        ({"input_ids": [1.5]}, "how long a row is.*got double"),
        ({"input_ids": [[1], None]}, "is null.*row 1"),
        ({"input_ids": [1, -2]}, "0 or more, got -2.*row 1"),
        ([1, 2], "each row must be a dict, got int.*row 0"),
        ([{"input_ids": 3}, {"input_ids": "a"}], "how long a row is.*got 'a'.*row 1"),
    ),
    *[
        case for method in ("best_fit", "first_fit", "concat") for case in of(
            lambda p, method=method: p.pack(8, method=method),
            ({"ids": [[1]]}, r"no column 'input_ids'.*there are \['ids'\]"),
            ({"input_ids": ["a"]}, "a list of numbers a row, got string; tokenize"),
            ({"input_ids": [1, 2]}, "a list of numbers a row, got int64"),
            ({"input_ids": [[0.5]]}, "token ids, which are integers, got list<item: double>"),
            ({"input_ids": [[1], None]}, "is null.*row 1"),
            ({"input_ids": [[1], [2, None]]}, "null within a list.*row 1"),
            ({"input_ids": [[1], [2**40]]}, "holds 1099511627776, which int32 cannot hold.*row 1"),
            (
                {"input_ids": [[1], [2, 3]], "labels": [[1], [2]]},
                "'labels' goes with 'input_ids'.*got 1 where 'input_ids' has 2.*row 1",
            ),
        )
    ],
    *of(
        lambda p: p.filter(lambda row: (x for x in row)),
        ([{"x": 1}], "must return True or False, got a generator.*row 0"),
    ),
    *of(lambda p: p.truncate(2, columns="inputs"), ({"input_ids": [[1]]}, "did you mean 'input_ids'")),
    *of(
        lambda p: p.truncate(2),
        ({"input_ids": ["a"]}, "must hold a list of numbers"),
        ([1, 2], "each row must be a dict|no dict, got int"),
    ),
    *of(lambda p: p.add_labels(where="mask"), ({"input_ids": [[1]]}, "mask")),
    *of(lambda p: p.add_labels(), ({"input_ids": [[1]], "labels": [[1]]}, "a column 'labels' already")),
    *of(lambda p: p.enumerate(output_column="x"), ({"x": [1]}, "a column 'x' already")),
    *of(
        lambda p: p.mask_tokens(mask_token_id=9, vocab_size=9, special_ids=[]),
        ({"input_ids": [[1]], "labels": [[1]]}, "a column 'labels' already"),
    ),
    *of(
        lambda p: p.sample(0.5, key="x"),
        ({"y": [1]}, "no column 'x'; there are"),
        ({"x": [[1]]}, "is list<"),
        ([1, 2], "each row must be a dict, got int"),
        ({"x": [1, 2, None]}, "column 'x' is null.*row 2"),
    ),
    *of(
        lambda p: p.decode_image(),
        ([{"img": b""}], "no column 'bytes'.*row 0"),
        ([{"bytes": b"", "image": 1}], "have a column 'image' already.*row 0"),
        ([{"bytes": 3}], "holds the bytes of files, or their paths or URLs, got 3.*row 0"),
        ([3], "must be a dict, got int.*row 0"),
    ),
    *of(
        lambda p: p.flip(),
        ([{"image": b"x"}], r"got b'x': put decode_image\(\) before.*row 0"),
        ([{"image": None}], "got None.*row 0"),
        ([{"image": PIXELS[0]}], r"an array \[4, 4\].*row 0"),
        ([{"image": PIXELS[:, :0]}], r"an array \[3, 0, 4\].*row 0"),
        ([{"picture": 3}], "no column 'image'.*row 0"),
        ([3], "must be a dict, got int.*row 0"),
    ),
    *of(
        lambda p: p.resize(2),
        ([{"image": PIXELS.astype(np.float32)}], r"put normalize\(\) after.*row 0"),
        ([{"image": np.zeros((9, 9, 3), np.uint8)}], r"an array \[9, 9, 3\].*row 0"),
    ),
    *of(lambda p: p.random_crop(5), ([{"image": PIXELS}], "4 x 4 pixels, and 5 x 5.*row 0")),
    *of(lambda p: p.center_crop(5), ([{"image": PIXELS}], "put resize.*row 0")),
    *of(lambda p: p.normalize(), ([{"image": PIXELS[:1]}], "1 channels, and mean 3.*row 0")),
]  # fmt: skip


@pytest.mark.parametrize(("data", "step", "message"), ROWS, ids=range(len(ROWS)))
def test_rows_that_do_not_fit_are_refused(data: Any, step: Make, message: str) -> None:
    message, _, row = message.partition(".*row ")
    source = tp.from_arrow(pa.table(data)) if isinstance(data, dict) else tp.from_dataset(data)
    with pytest.raises(tp.DataError, match=message) as caught:
        list(step(source))
    assert not row or caught.value.row == int(row)
    assert re.match(r"\w+\(", caught.value.stage or "")


UNCOUNTED: dict[str, tuple[Make, str]] = {
    "batch": (lambda p: p.batch(max_tokens=512), r"how many items batch\(max_tokens=512\) makes"),
    "bucket_by_length": (lambda p: p.bucket_by_length(max_tokens=512), "bucket_by_length.* is known only"),
    "pack": (lambda p: p.shuffle(500).pack(64).batch(4), r"how many items pack\(64\) makes is known only"),
    "sample": (lambda p: p.sample(0.5).batch(4), r"sample\(0.5\)"),
}  # fmt: skip


@pytest.mark.parametrize("stage", UNCOUNTED)
def test_a_length_that_is_not_known_can_be_estimated(stage: str) -> None:
    make, message = UNCOUNTED[stage]
    lengths = np.random.default_rng(0).integers(1, 40, 6000).tolist()
    pipe = make(rows(lengths).sharding_filter(4))
    with pytest.raises(TypeError, match=message):
        len(pipe)
    assert abs(tp.Loader(pipe).estimate_len() / len(list(pipe)) - 1) < 0.05


PAST: dict[str, Make] = {
    "bucket_by_length": lambda p: p.bucket_by_length(2, buffer_size=10),
    **{
        f"pack {method}": lambda p, method=method: p.pack(10, method=method, buffer_size=16)
        for method in ("best_fit", "first_fit", "concat")
    },
}


@pytest.mark.parametrize("stage", PAST)
def test_a_state_that_points_past_what_is_there_is_refused(stage: str) -> None:
    pipe = PAST[stage](rows(range(30)))
    next(iterator := iter(pipe))
    state = iterator.state_dict()
    state["shard-0000"] = json.dumps({**json.loads(state["shard-0000"]), "row": 999})
    pipe.load_state_dict(resealed(state))
    with pytest.raises(tp.StateError, match="edited or is damaged"):
        next(iter(pipe))


@pytest.mark.parametrize(
    "later",
    [lambda p: p.select("n"), lambda p: p.drop_columns("n"), lambda p: p.rename({"n": "m"})],
)
@pytest.mark.parametrize("how", ["collate", "pad_collate", "map"])
def test_columns_of_batches_are_not_chosen_without_a_word(later: Any, how: str) -> None:
    rows = tp.from_dataset([{"n": 1, "x": 2}] * 4).batch(2)
    pipe = rows.map(lambda batch: {"n": len(batch)}) if how == "map" else getattr(rows, how)()
    with pytest.raises(tp.ConfigError, match=r"works on rows: put it before"):
        next(iter(later(pipe)))


def test_what_is_no_list_of_stages_or_rows_is_refused() -> None:
    pipe = tp.from_dataset([1])
    for stages in (pipe, [5], "a.parquet", []):
        with pytest.raises(tp.ConfigError, match=r"Pipeline\(stages\) must be a list of stages"):
            tp.Pipeline(stages)  # type: ignore[arg-type]
    with pytest.raises(tp.ConfigError, match="from_arrow"):
        tp.from_dataset(pa.table({"x": [1]}))
    with pytest.raises(tp.ConfigError, match=r"allow_imports\) must be True or False"):
        loads("stages: [{list_files: data}]", allow_imports="no")  # type: ignore[arg-type]


# Columns and rows that come in another form


TABLE = pa.table({"x": [1, 2]})
FORMS: dict[str, Any] = {
    "columns": {"x": [1, 2]},
    "rows": [{"x": 1}, {"x": 2}],
    "batches": TABLE.to_batches(),
    "reader": TABLE.to_reader(),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_table_is_refused_with_the_code_that_makes_one(form: str) -> None:
    with pytest.raises(tp.ConfigError, match="takes a pyarrow") as caught:
        tp.from_arrow(FORMS[form])
    code = str(caught.value).partition("write ")[2]
    pipe = eval(f"tp.{code}", {"tp": tp, "pa": pa, "data": FORMS[form]})
    assert list(pipe) == [{"x": 1}, {"x": 2}]


def test_columns_are_no_rows_by_number() -> None:
    with pytest.raises(tp.ConfigError, match=r"from_arrow\(pa.table\(data\)\) gives its rows"):
        tp.from_dataset({"x": np.arange(3), "y": [1, 2, 3]})
    about = {"__dataframe__": None, "__len__": len, "__getitem__": getattr}
    kind = type(
        "DataFrame", (), about
    )  # as those of pandas and Polars are, which are not installed
    for take, said in ((tp.from_dataset, "gives its rows"), (tp.from_arrow, "write from_arrow")):
        with pytest.raises(tp.ConfigError, match=said) as caught:
            take(kind())
        assert "from_arrow(pa.table(data))" in str(caught.value)
    with pytest.raises(tp.ConfigError, match=r"from_tensors\(\*\*tensors\) takes them by name"):
        tp.from_tensors({"x": torch.arange(3)})
    by_key = tp.from_dataset({"a": [1, 2], "b": [3, 4]}, sampler=["b", "a"])
    assert list(by_key) == [[3, 4], [1, 2]]
