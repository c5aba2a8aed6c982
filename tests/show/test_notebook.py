"""In a notebook batches show themselves, whatever they hold."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import trainpipes as tp

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Page(HTMLParser):
    """HTML whose elements are opened and closed in turn."""

    EMPTY = ("img", "br", "rect", "path", "progress")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(value: Any) -> Page:
    found = Page(value._repr_html_())
    assert "script" not in found.tags
    assert not {name for name in found.attributes if name.startswith("on")}
    return found


def test_the_next_batches_of_a_loader_are_shown_and_nothing_moves() -> None:
    loader = tp.Loader(tp.from_tensors(x=range(20)).shuffle(20).batch(4).collate())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert len(loader.show(2)) == 2
    assert loader.state_dict() == state
    loader.load_state_dict(state)
    shown = loader.show().items[0]
    assert shown.rows == 4
    assert torch.equal(next(iter(loader))["x"], next(batches)["x"])


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"x": torch.zeros(2, 3)}, "batch  dict of 1, 2 rows"),
        ((torch.zeros(2, 3), torch.zeros(2)), "batch  tuple of 2, 2 rows"),
        (torch.zeros(0, 5), "batch  Tensor, 0 rows"),
        (np.zeros((2, 2)), "batch  ndarray, 2 rows"),
        ([{"x": 1}, {"x": None}], "batch  list of 2, 2 rows"),
        (pa.table({"x": [1, 2], "y": [None, "b"]}), "batch  Table of 2 columns, 2 rows"),
        (pa.table({"x": pa.array([], pa.int64())}), "batch  Table of 1 column, 0 rows"),
        ({"x": {"y": torch.zeros(3, 1)}}, "batch  dict of 1, 3 rows"),
        ({"x": torch.zeros(2, 3, dtype=torch.bfloat16)}, "x  tensor bfloat16  [2, 3]  0 to 0"),
        ({"x": torch.tensor([[float("nan"), 1.0]])}, "1 NaN"),
        ({"x": torch.zeros(2, device="meta")}, "x  tensor float32 on meta  [2]"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "x  tensor float32"),
        ({"x": "é\u202e\x1b[31m"}, r"é\u202e\x1b[31m"),
        ({"x": "long " * 1000}, "str of 5,000 characters"),
        ({"input_ids": [1, 2, 3]}, "row  dict of 1"),
        ({}, "row  dict of 0"),
        ([], "row  list of 0"),
        (None, "row  NoneType"),
        (CYCLE, "batch  list of 1"),
    ],
)
def test_any_batch_can_be_shown(item: Any, said: str) -> None:
    shown = tp.show(item)
    assert said in repr(shown)
    page(shown)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_ragged_tensors_can_be_shown(layout: torch.layout) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    assert "batch  dict of 1, 2 rows" in repr(tp.show({"x": ragged}))


def test_what_rows_hold_is_text_and_no_html() -> None:
    for item in (
        {EVIL: EVIL},
        [{EVIL: [EVIL]}],
        {"input_ids": torch.tensor([list(EVIL.encode())])},
        {"x": EVIL.encode()},
        pa.table({EVIL: [EVIL]}),
    ):
        found = page(tp.show(item, tokenizer="bytes"))
        assert "img" not in found.tags


def test_a_tokenizer_makes_text_of_ids() -> None:
    batch = next(
        iter(tp.from_dataset([{"text": "Hello"}]).tokenize("bytes", "text").batch(1).pad_collate())
    )
    assert "Hello" in repr(tp.show(batch, tokenizer="bytes"))
    assert "72 101" in repr(tp.show(batch))
    assert "Hello" in page(tp.show(batch, tokenizer="bytes")).text


def test_of_a_huge_batch_only_what_is_shown_is_looked_at() -> None:
    looked = []

    class Huge(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            looked.append(index)
            return super().__getitem__(index)

        def __iter__(self) -> Any:
            raise AssertionError("all of it")

    rows = Huge([{"x": n} for n in range(100_000)])
    shown = tp.show(rows, rows=3)
    assert shown.items[0].rows == 100_000
    assert len(shown.items[0].inner) == 3
    assert len(shown._repr_html_()) < 10_000
    ids = {"input_ids": torch.ones(20_000, 512, dtype=torch.int64)}
    assert len(tp.show(ids, tokenizer="bytes")._repr_html_()) < 20_000


def test_colours_are_see_through_or_those_of_the_page() -> None:
    rows = tp.from_dataset([{"prompt": "a", "response": "b"}] * 4)
    pipe = tp.recipe("sft", rows, tokenizer="bytes", batch_size=2)
    html = pipe.show()._repr_html_()
    assert not re.findall(r"(?<!border-left:3px solid )(?:color|background):(?!rgba)", html)


def test_show_takes_rows_of_one_or_more() -> None:
    with pytest.raises(tp.ConfigError, match=r"show\(rows\)"):
        tp.show({}, rows=0)
