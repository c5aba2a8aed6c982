"""A diagram of a pipeline says what flows where, and shows no secrets."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainpipes as tp
from every_stage import ENDLESS, FINITE
from trainpipes.samplers import WeightedRandomSampler

TABLE = pa.table({"text": [f"row {n}" for n in range(100)]})


def rows() -> tp.Pipeline:
    return tp.from_arrow(TABLE)


def diagram(pipe: tp.Pipeline) -> str:
    return pipe.explain().mermaid


def edges(pipe: tp.Pipeline) -> list[str]:
    """What is said of each line of a diagram, from the first to the last."""
    return re.findall(r'-->\|"(.*)"\|', diagram(pipe))


def test_what_flows_is_counted_where_rows_are_in_memory():
    pipe = rows().shuffle(50).tokenize("bytes", "text").batch(8).pad_collate()
    assert edges(pipe) == [
        "100 rows", "100 rows", "100 token rows", "13 batches of 8",
        "13 batches of 8 in an epoch",
    ]  # fmt: skip


CHAINS: list[tp.Pipeline] = [
    rows().take(30).skip(4).batch(4, drop_last=True),
    rows().repeat(3).batch(7),
    rows().batch(7).repeat(3),
    rows().batch(7).take(3),
    rows().shuffle(9).batch(101),
    tp.concat(rows(), rows().take(7)).batch(10),
    tp.zip(rows(), rows().rename({"text": "other"})).batch(10),
    tp.from_dataset(range(10)).shuffle(sampler=WeightedRandomSampler([1.0] * 10, 25)).batch(2),
]


@pytest.mark.parametrize("pipe", CHAINS, ids=str)
def test_the_last_count_is_the_length(pipe):
    assert edges(pipe)[-1].startswith(f"{len(pipe)} batch")


def test_shares_make_counts_that_are_about():
    assert edges(rows().sample(0.25).batch(5))[:2] == ["100 rows", "about 25 rows"]
    assert edges(rows().filter(lambda row: True).batch(5))[-1] == "batches of 5"


def test_without_an_end_there_is_no_count():
    assert edges(rows().repeat().batch(5))[-1] == "batches of 5, epoch after epoch"


def test_one_is_said_as_one():
    assert edges(rows().batch(100))[-1] == "1 batch of 100 in an epoch"
    assert edges(rows().take(1).batch(1))[1] == "1 row"


def test_a_notebook_shows_a_diagram_and_opens_no_file_for_that(tmp_path):
    nowhere = tp.list_files(str(tmp_path / "nowhere" / "*.parquet")).read_parquet().batch(4)
    for shown in (nowhere, tp.Loader(nowhere)):
        found = shown._repr_mimebundle_()
        assert found["text/plain"] == repr(shown)
        assert found["text/vnd.mermaid"].startswith("flowchart")
        assert "batches of 4" in found["text/vnd.mermaid"]
    pq.write_table(TABLE, tmp_path / "a.parquet")
    there = tp.list_files(tmp_path).read_parquet().batch(4)
    assert "25 batches" not in there._repr_mimebundle_()["text/vnd.mermaid"]
    found = there.explain()._repr_mimebundle_()
    assert found["text/plain"] == str(there.explain())
    assert "25 batches of 4 in an epoch" in found["text/vnd.mermaid"]
    assert "25 batches" in there._repr_mimebundle_()["text/vnd.mermaid"]  # known from here on


def test_a_mix_has_a_branch_for_each_source_with_its_share():
    web, code = rows().shuffle(9), rows().filter(lambda row: True)
    mixed = tp.mix({"web": web, "code": code}, weights={"web": 3, "code": 1}).batch(4)
    assert edges(mixed)[2:4] == ["web, 75.0%, 100 rows", "code, 25.0%"]
    steps = [(0, {"web": 1, "code": 1}), (100, {"web": 1, "code": 0})]
    moving = tp.mix({"web": rows(), "code": rows()}, schedule=steps).batch(4)
    assert edges(moving)[0] == "web, 50.0% to 100.0%, 100 rows"


def test_files_of_a_mix_are_counted_together_with_it(tmp_path):
    pq.write_table(TABLE, tmp_path / "a.parquet")
    files = tp.read_parquet(tmp_path / "a.parquet")
    assert "a, 50.0%, 100 rows" in edges(
        tp.mix({"a": files, "b": rows()}, weights={"a": 1, "b": 1})
    )
    assert "200 rows" in edges(tp.concat(files, rows()).batch(2))


def test_branches_can_have_branches():
    inner = tp.zip(rows(), rows().rename({"text": "b"})).select("text")
    mermaid = diagram(tp.concat(inner, rows()))
    assert mermaid.count("from_arrow") == 3
    assert mermaid.index("zip") < mermaid.index("concat")


def test_many_sources_are_a_box_each():
    sources = {f"source {n}": rows().shuffle(n + 2) for n in range(20)}
    pipe = tp.mix(sources, weights=dict.fromkeys(sources, 1)).batch(4)
    assert edges(pipe)[:20] == [f"{name}, 5.0%, 100 rows" for name in sources]
    assert len(edges(pipe)) == 22  # and of the mix, and of the batches
    for n in range(20):
        assert f"<br/>shuffle(buffer_size={n + 2}, seed=0)" in diagram(pipe)


def test_of_what_ranks_share_the_end_counts_all_of_it():
    pipe = rows().sharding_filter(8).shuffle(10).tokenize("bytes", "text").batch(4)
    assert edges(pipe)[-1].endswith("in an epoch, over all ranks")


def test_no_secret_is_shown():
    pipe = tp.list_files(
        "s3://key:hunter2@bucket/a.parquet", storage_options={"secret": "hunter3"}
    ).read_parquet()
    drawn = pipe._repr_mimebundle_()["text/vnd.mermaid"]
    assert "bucket/a.parquet" in drawn
    assert "hunter" not in drawn
    assert "storage_options" not in drawn


ODD = 'a"b<c>&`#;\\ e\x00\n\u202e日本🙂'


def test_odd_names_break_nothing():
    pipe = tp.mix({ODD: rows(), "end": rows()}, weights={ODD: 1, "end": 1}).batch(2)
    assert "日本🙂" in diagram(pipe)
    for line in diagram(pipe).splitlines():
        inside = re.sub(r"<br/>|#\d+;", "", line)
        assert not re.search(
            r'"[^"]*["<>&`\\\x00][^"]*"', inside.replace('["', '"').replace('"]', '"')
        )


@given(st.text(min_size=1, max_size=60))
@settings(max_examples=8, deadline=None)
def test_any_name_stays_in_its_line(name):
    mermaid = diagram(tp.mix({name: rows()}, weights={name: 1}))
    assert mermaid.count("\n") + 1 == len(mermaid.splitlines())


@pytest.mark.parametrize("name", [*FINITE, *ENDLESS])
def test_every_stage_is_there_with_its_counts(name, tmp_path):
    pipe = {**FINITE, **ENDLESS}[name](tmp_path)
    final = edges(pipe)[-1]
    try:
        known = len(pipe)
    except TypeError:
        assert not re.match(r"\d", final)
    else:
        assert final.startswith(f"{known:,} ")
