"""A drawing of a pipeline says what flows where, fits its boxes, and shows no secrets."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainpipes as tp
from every_stage import ENDLESS, FINITE
from trainpipes.look.pictures.text_width import mono_width, text_width
from trainpipes.samplers import WeightedRandomSampler

TABLE = pa.table({"text": [f"row {n}" for n in range(100)]})


def rows() -> tp.Pipeline:
    return tp.from_arrow(TABLE)


def edges(pipe: tp.Pipeline, **options: Any) -> list[str]:
    """What is said of each line of a drawing, from the first to the last."""
    return re.findall(r'-->\|"(.*)"\|', str(pipe.graph(**options)))


def texts(pipe: tp.Pipeline) -> list[str]:
    tree = ElementTree.fromstring(pipe.graph().svg)
    return [text.text or "" for text in tree.iter("{http://www.w3.org/2000/svg}text")]


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


def test_nothing_is_listed_unless_it_is_asked_for(tmp_path):
    nowhere = tp.list_files(str(tmp_path / "nowhere" / "*.parquet")).read_parquet().batch(4)
    assert edges(nowhere) == ["files", "rows", "batches of 4"]
    with pytest.raises(tp.MissingFilesError):
        nowhere.graph(counts=True)
    pq.write_table(TABLE, tmp_path / "a.parquet")
    there = tp.list_files(tmp_path).read_parquet().batch(4)
    assert edges(there)[-1] == "batches of 4"
    assert edges(there, counts=True)[-1] == "25 batches of 4 in an epoch"
    assert edges(there)[-1] == "25 batches of 4 in an epoch"  # they are known from here on


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
        tp.mix({"a": files, "b": rows()}, weights={"a": 1, "b": 1}), counts=True
    )
    assert "200 rows" in edges(tp.concat(files, rows()).batch(2), counts=True)


def test_branches_can_have_branches():
    inner = tp.zip(rows(), rows().rename({"text": "b"})).select("text")
    mermaid = str(tp.concat(inner, rows()).graph())
    assert mermaid.count("from_arrow") == 3
    assert mermaid.index("zip") < mermaid.index("concat")


def test_many_sources_are_cards():
    sources = {f"source {n}": rows().shuffle(n + 2) for n in range(20)}
    pipe = tp.mix(sources, weights=dict.fromkeys(sources, 1)).batch(4)
    assert "20 pipelines" in texts(pipe)
    assert len(edges(pipe)) == 3  # of all cards, of the mix, of the batches
    for name in sources:
        assert f"{name}, 5.0%, 100 rows" in texts(pipe)


def test_what_each_rank_does_is_framed():
    pipe = rows().sharding_filter(8).shuffle(10).tokenize("bytes", "text").batch(4)
    before, _, framed = str(pipe.graph()).partition("subgraph")
    assert framed.startswith(' dealt["8 shards, dealt to ranks and workers"]')
    assert "shuffle" in before
    assert "tokenize" in framed.partition("end")[0]
    assert edges(pipe)[-1].endswith("in an epoch, over all ranks")
    assert "dealt" not in str(rows().batch(4).graph())


def test_no_secret_is_drawn():
    pipe = tp.list_files(
        "s3://key:hunter2@bucket/a.parquet", storage_options={"secret": "hunter3"}
    ).read_parquet()
    drawn = pipe.graph().svg + pipe.graph().mermaid
    assert "bucket/a.parquet" in drawn
    assert "hunter" not in drawn
    assert "storage_options" not in drawn


ODD = 'a"b<c>&`#;\\ e\x00\n\u202e日本🙂'


def test_odd_names_break_neither_form():
    pipe = tp.mix({ODD: rows(), "end": rows()}, weights={ODD: 1, "end": 1}).batch(2)
    graph = pipe.graph()
    assert any("日本🙂" in text for text in texts(pipe))
    for line in graph.mermaid.splitlines():
        inside = re.sub(r"<br/>|#\d+;", "", line)
        assert not re.search(
            r'"[^"]*["<>&`\\\x00][^"]*"', inside.replace('["', '"').replace('"]', '"')
        )


@given(st.text(max_size=60))
@settings(max_examples=25, deadline=None)
def test_any_name_gives_a_picture_that_is_well_formed(name):
    if not name:
        return
    graph = tp.mix({name: rows()}, weights={name: 1}).graph()
    ElementTree.fromstring(graph.svg.encode())
    assert graph.mermaid.count("\n") + 1 == len(graph.mermaid.splitlines())


LETTERS = st.characters(
    min_codepoint=32, max_codepoint=0x17F, categories=["L", "N", "P", "S", "Zs"]
)


@given(st.text(LETTERS, min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_texts_are_never_wider_than_was_reckoned(text):
    fonts = pytest.importorskip("matplotlib.textpath")
    properties = pytest.importorskip("matplotlib.font_manager").FontProperties
    for family, width in (("DejaVu Sans", text_width), ("DejaVu Sans Mono", mono_width)):
        escaped = text.replace("$", "S").replace("\\", "/")
        found, *_ = fonts.text_to_path.get_text_width_height_descent(
            escaped, properties(family=family, size=12), False
        )
        assert found <= width(escaped, 12) + 2


def test_texts_stand_inside_their_boxes():
    pipe = tp.list_files("s3://bucket/" + "long/" * 40 + "*.parquet").read_parquet(
        [f"column_{n}" for n in range(30)]
    )
    tree = ElementTree.fromstring(pipe.graph().svg)
    space = "{http://www.w3.org/2000/svg}"
    boxes = 0
    for group in tree.iter(f"{space}g"):
        box = group.find(f"{space}rect")
        if box is None or "frame" in box.get("class", ""):
            continue
        boxes += 1
        for text in group.findall(f"{space}text"):
            assert mono_width(text.text or "", 12) <= float(box.get("width", 0))
            assert float(text.get("y", 0)) < float(box.get("height", 0))
    assert boxes == 3


def test_it_is_saved_by_its_suffix(tmp_path):
    graph = rows().batch(2).graph()
    graph.save(tmp_path / "a.svg")
    graph.save(str(tmp_path / "a.mmd"))
    assert (tmp_path / "a.svg").read_text("utf-8") == graph._repr_svg_() + "\n"
    assert (tmp_path / "a.mmd").read_text("utf-8") == str(graph) + "\n"
    with pytest.raises(tp.ConfigError, match=r"\.svg or \.mmd \(Mermaid\), got .*a\.png"):
        graph.save(tmp_path / "a.png")
    assert "2 stages" in repr(graph)


def test_drawing_starts_no_epoch():
    pipe = rows().shuffle(10).batch(4)
    first = pipe.peek()
    pipe.graph(counts=True)
    assert pipe.peek() == first
    assert pipe.state_dict()["m"] == 0


@pytest.mark.parametrize("name", [*FINITE, *ENDLESS])
def test_every_stage_can_be_drawn_with_its_counts(name, tmp_path):
    pipe = {**FINITE, **ENDLESS}[name](tmp_path)
    ElementTree.fromstring(pipe.graph(counts=True).svg)
    final = edges(pipe, counts=True)[-1]
    try:
        known = len(pipe)
    except TypeError:
        assert not re.match(r"\d", final)
    else:
        assert final.startswith(f"{known:,} ")
