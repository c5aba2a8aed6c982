"""The page that a profile writes: whole, alone, and with what the run did."""

from __future__ import annotations

import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import trainpipes as tp
from trainpipes.cli.app import run as command
from trainpipes.look.profiling.page import area, bars, layers_of

VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Tags, as they are opened and closed, texts, and what a page would ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.asked: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        asks = ("src", "href", "srcset", "action")
        self.asked += [f"{k}={v}" for k, v in attrs if k in asks and v != "data:,"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def rows() -> tp.Pipeline:
    texts = [{"text": f"<script>{n}</script> & 'more' " * (n % 5 + 1)} for n in range(400)]
    return tp.from_dataset(texts).sharding_filter(2).shuffle(40)


def clean(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(1e-3)
    return row


def run_of(pipe: tp.Pipeline, **options: Any) -> Any:
    loader = tp.Loader(pipe, **options)
    with tp.profile(loader) as run:
        for _ in loader:
            time.sleep(1e-3)
    return run


def test_a_page_is_whole_and_asks_for_no_other_file(tmp_path: Path) -> None:
    run = run_of(rows().map(clean).tokenize("bytes", "text").batch(8).pad_collate())
    run.save(tmp_path / "run.html")
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]
    text = (tmp_path / "run.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.asked == []
    assert "url(" not in text
    assert "@import" not in text
    assert "script" not in page.tags
    said = " ".join(page.texts)
    for _, line in run.lines():
        assert line in said
    for heading in (
        "waited for data",
        "the thread that iterates",
        "Tokens of a row",
        "shuffled",
        "first rows",
    ):
        assert heading in said
    assert "map(clean" in said
    assert "<script>" in said  # as text, of the first rows
    assert page.tags.count("svg") >= 3


def test_a_page_of_rows_without_ids_has_what_there_is(tmp_path: Path) -> None:
    run_of(tp.from_dataset(range(100)).batch(4), threads=0).save(str(tmp_path / "run.html"))
    page = Page((tmp_path / "run.html").read_text())
    assert "Tokens of a row" not in page.texts
    assert "How well rows are shuffled" not in page.texts
    assert page.open == []


def test_a_page_may_be_written_within_the_block_and_over_another(tmp_path: Path) -> None:
    loader = tp.Loader(rows().batch(4))
    with tp.profile(loader) as run:
        next(iter(loader))
        run.save(tmp_path / "run.html")
    first = (tmp_path / "run.html").read_text()
    run.save(tmp_path / "run.html")
    assert Page(first).open == Page((tmp_path / "run.html").read_text()).open == []


def test_where_a_page_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    run = run_of(rows().batch(4))
    with pytest.raises(tp.ConfigError, match=r"none/run\.html cannot be written: No such file"):
        run.save(tmp_path / "none" / "run.html")
    (tmp_path / "run.html").mkdir()
    with pytest.raises(tp.ConfigError, match=r"run\.html cannot be written"):
        run.save(tmp_path / "run.html")
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]
    with pytest.raises(tp.ConfigError, match="shows a run"):
        tp.profile(tp.Loader(rows().batch(4))).save(tmp_path / "other.html")


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"x": {n}}}\n' for n in range(500)))
    page = tmp_path / "run.html"
    assert command(["run", str(data), "--steps", "5", "--html", str(page)]) == 0
    assert "verdict" in capsys.readouterr().out
    assert Page(page.read_text()).open == []


def test_pictures_are_whole_whatever_the_values() -> None:
    names = ["a & b", "<c>", *"defghij"]
    points = [{name: (n * k) % 5 / 2 for k, name in enumerate(names)} for n in range(7)]
    layers = layers_of(points)
    assert list(layers)[-1] == "all others"
    totals = [sum(point.values()) for point in points]
    assert [sum(step) for step in zip(*layers.values(), strict=True)] == pytest.approx(totals)
    for drawn in (
        area("x < y", [0.5 * n for n in range(1, 8)], layers, "%"),
        area("nothing", [], {}, ""),
        area("none", [1.0, 2.0], {"a": [0.0, 0.0]}, ""),
        bars("bars", [("a", 0.0), ("<b>", 12.0)], ""),
        bars("none", [], ""),
    ):
        root = ElementTree.fromstring(f"<div>{drawn}</div>")
        for one in root.iter("polygon"):
            for point in one.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= 640
                assert -0.1 <= y <= 180
