"""A diagram of a pipeline has a box for each stage and shows no secrets."""

from __future__ import annotations

import re

import pyarrow as pa

import trainpipes as tp

TABLE = pa.table({"text": [f"row {n}" for n in range(100)]})


def rows() -> tp.Pipeline:
    return tp.from_arrow(TABLE)


def diagram(pipe: tp.Pipeline) -> str:
    return pipe.explain().mermaid


def test_a_chain_leads_to_the_training_loop() -> None:
    head, _, *lines = diagram(rows().shuffle(50).batch(8)).splitlines()
    assert head == "flowchart TB"
    assert lines == [
        '    stage2["shuffle(50)"]', '    stage3["batch(8)"]', "    stage1 --> stage2",
        "    stage2 --> stage3", '    stage3 --> training(["training loop"])',
    ]  # fmt: skip


def test_a_notebook_shows_a_diagram_and_opens_no_file_for_that(tmp_path) -> None:
    nowhere = tp.list_files(str(tmp_path / "nowhere" / "*.parquet")).read_parquet().batch(4)
    for shown in (nowhere, tp.Loader(nowhere)):
        found = shown._repr_mimebundle_()
        assert found["text/plain"] == repr(shown)
        assert "batch(4)" in found["text/vnd.mermaid"]
    told = rows().explain()
    assert told._repr_mimebundle_() == {"text/plain": str(told), "text/vnd.mermaid": told.mermaid}


def test_a_mix_has_a_named_branch_for_each_source_and_branches_can_have_branches() -> None:
    mixed = tp.mix({"web": rows().shuffle(9), "code": rows()}, weights={"web": 3, "code": 1})
    assert re.findall(r'-->\|"(.*)"\|', diagram(mixed.batch(4))) == ["web", "code"]
    assert "mix(2 pipelines, weights={'web': 3, 'code': 1}" in re.sub("<br/>", " ", diagram(mixed))
    inner = tp.zip(rows(), rows().rename({"text": "b"})).select("text")
    drawn = diagram(tp.concat(inner, rows()))
    assert drawn.count("from_arrow") == 3
    assert drawn.index("zip") < drawn.index("concat")


def test_no_secret_is_shown() -> None:
    files = "s3://key:hunter2@bucket/a.parquet"
    pipe = tp.read_parquet(files, storage_options={"secret": "hunter3"})
    drawn = pipe._repr_mimebundle_()["text/vnd.mermaid"]
    assert "bucket/a.parquet" in drawn
    assert "hunter" not in drawn


ODD = 'a"b<c>&`#;\\ e\x00\n\u202e日本🙂'


def test_odd_names_break_nothing() -> None:
    drawn = diagram(tp.mix({ODD: rows(), "end": rows()}, weights={ODD: 1, "end": 1}).batch(2))
    assert "日本🙂" in drawn
    for line in drawn.splitlines():
        inside = re.sub(r"<br/>|#\d+;", "", line).replace('["', '"').replace('"]', '"')
        assert not re.search(r'"[^"]*["<>&`\\\x00][^"]*"', inside)
