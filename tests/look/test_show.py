"""``pipe.show()``, ``loader.show()`` and ``tp.show(item)``: items for people to read, whatever they hold."""

from __future__ import annotations

import dataclasses
import io
import re
from collections import namedtuple
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from tokenizer_fixtures import TEXTS, bpe, sentencepiece_model, tiktoken_encoding
from trainpipes.errors import escaped
from trainpipes.tokenizers.adapters import load

SUMS = [{"prompt": f"{k} + {k} =", "response": f" {2 * k}"} for k in range(40)]


def sft(**options):
    given = {"batch_size": 4, "num_shards": 4, **options}
    return tp.recipe("sft", tp.from_dataset(SUMS), "bytes", **given)


class Page(HTMLParser):
    """What a notebook shows; it has no tags but those of text."""

    def __init__(self, shown):
        super().__init__()
        self.text = ""
        self.feed(shown._repr_mimebundle_()["text/html"])
        self.close()
        self.text = "\n".join(line.rstrip() for line in self.text.splitlines())

    def handle_starttag(self, tag, attrs):
        assert tag in ("pre", "span")
        assert {name for name, _ in attrs} <= {"style"}

    def handle_data(self, data):
        self.text += data


# The position


def values(shown):
    return [view.values for view in shown.items]


def test_items_are_those_that_come_next_and_the_position_does_not_move():
    pipe = sft()
    pipe.peek()  # from here on the state has the columns of the rows, which are found at the first look
    before = pipe.state_dict()
    shown = pipe.show(3)
    assert pipe.state_dict() == before
    came = [batch for batch, _ in zip(pipe, range(3), strict=False)]
    assert values(shown) == [values(tp.show(batch))[0] for batch in came]


def test_after_a_load_the_items_after_it_are_shown():
    pipe, other = sft(), sft()
    items = iter(pipe)
    next(items), next(items)
    other.load_state_dict(items.state_dict())
    assert values(other.show(1)) == values(tp.show(next(items)))


def test_at_the_end_of_an_epoch_the_next_one_is_shown():
    pipe, other = sft(), sft()
    items = iter(pipe)
    for _ in items:
        pass
    other.load_state_dict(pipe.state_dict())
    assert len(other.show(2)) == 2


def test_no_item_is_an_error():
    with pytest.raises(tp.DataError, match=r"show\(\) shows the first items"):
        tp.from_dataset(SUMS).filter(nothing).show()


def nothing(row):
    return False


@pytest.mark.parametrize("options", [{"n": 0}, {"n": True}, {"n": "3"}, {"rows": 0}, {"n": 10**9}])
def test_counts_are_checked(options):
    with pytest.raises(tp.ConfigError, match=r"show\("):
        sft().show(**options)


# What items may be

Named = namedtuple("Named", ["x", "y"])


@dataclasses.dataclass
class Record:
    ids: torch.Tensor
    name: str


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


def ragged(layout=torch.strided):
    return torch.nested.nested_tensor([torch.ones(2).long(), torch.ones(3).long()], layout=layout)


CYCLE, LOOP = [], {}
CYCLE.append(CYCLE)
LOOP["x"] = LOOP
RAGGED = "dict of 2, 2 rows", "5 tokens; padding 1 of 6 cells"

#: Items, and what is said of them.
ITEMS = {
    "none": (None, "row  NoneType"),
    "number": (3, ""),
    "float": (0.5, ""),
    "text": ("a\x1b[2Jb", ""),
    "escapes": ({"x": "é\u202e\x1b[31m"}, r"é\u202e\x1b[31m"),
    "long text": ({"x": "long " * 1000}, "str of 5,000 characters"),
    "bytes": (b"\x00\xff", ""),
    "tensor": (torch.arange(6).view(2, 3), ""),
    "tensors": ({"x": torch.zeros(2, 3)}, "batch  dict of 1, 2 rows"),
    "tensors within": ({"x": {"y": torch.zeros(3, 1)}}, "batch  dict of 1, 3 rows"),
    "scalar": (torch.tensor(1.5), ""),
    "empty tensor": (torch.zeros(0, 4), "batch  Tensor, 0 rows"),
    "nan": ({"x": torch.tensor([[float("nan"), 1.0, float("inf")]])}, "1 NaN"),
    "all nan": (torch.full((2,), float("nan")), ""),
    "half": ({"x": torch.zeros(2, 3, dtype=torch.bfloat16)}, "x  tensor bfloat16  [2, 3]  0 to 0"),
    "float8": (torch.zeros(2, 3).to(torch.float8_e4m3fn), ""),
    "complex": (torch.zeros(2, dtype=torch.complex64), ""),
    "bool": (torch.ones(2, 2, dtype=torch.bool), ""),
    "meta": ({"x": torch.zeros(2, device="meta")}, "x  tensor float32 on meta  [2]"),
    "sparse": ({"x": torch.eye(3).to_sparse()}, "x  tensor float32"),
    "bare sparse": (torch.eye(3).to_sparse(), "batch  Tensor, 3 rows"),
    "bare nested": (torch.nested.nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged),
        "batch  NestedTensor, 2 rows"),
    "ragged": ({"x": ragged, "input_ids": ragged}, RAGGED),
    "jagged": ({"x": ragged(torch.jagged), "input_ids": ragged(torch.jagged)}, RAGGED),
    "array": (np.zeros((2, 2), dtype=np.uint16), "batch  ndarray, 2 rows"),
    "objects": (np.array(["a", None], dtype=object), ""),
    "times": (np.array(["2024-01-01"], dtype="datetime64[s]"), ""),
    "zero dimensions": (np.float32(2.0), ""),
    "table": (pa.table({"x": [1, 2], "y": [None, "b"]}), "batch  Table of 2 columns, 2 rows"),
    "empty table": (pa.table({"x": pa.array([], pa.int64())}), "batch  Table of 1 column, 0 rows"),
    "nanoseconds": (pa.table({"x": pa.array([0, 1], pa.timestamp("ns")), "y": ["a", "b"]}), "b"),
    "a time far off": (pa.table({"x": pa.array([10**15], pa.timestamp("s"))}), "<timestamp[s]>"),
    "columns of one name": (pa.table([[1], [2], [3]], names=["a", "b", "a"]),
        ("dict of 3", "a (column 1)  int    1", "a (column 3)  int    3")),
    "tuple": ((torch.zeros(2, 3), torch.tensor([0, 1])), "batch  tuple of 2, 2 rows"),
    "empty tuple": ((), ""),
    "list of tensors": ({"x": [torch.zeros(2), torch.zeros(3)]}, "batch  dict of 1"),
    "list": ([1, 2, 3], ""),
    "list of numbers": ({"x": [1, 2.5, 3]}, "x  list  [3]  1 to 3"),
    "list of texts": (["a\n", "b"], ""),
    "mixed list": ([1, None, "a", [2]], ""),
    "empty list": ([], "row  list of 0"),
    "rows": ([{"x": 1}, {"x": None}], "batch  list of 2, 2 rows"),
    "empty dict": ({}, "row  dict of 0"),
    "list in itself": (CYCLE, "batch  list of 1"),
    "dict in itself": (LOOP, "row  dict of 1"),
    "deep": ({"text": ["a", "b"], "x": torch.zeros(2), "in": {"deep": {"deeper": {"still": {"on": 1}}}}}, ""),
    "odd keys": ({1: 2, ("a", "b"): 3, "\x1b[31m": 4}, ""),
    "named tuple": (Named(torch.zeros(2, 2), "b"), ""),
    "record": (Record(torch.zeros(2, 2), "c"), ""),
    "rude": ({"x": Rude()}, ""),
    "set": ({1, 2}, ""),
    "overflow": ({"x": [1.0, 10**400], "y": 1}, ""),
    "several devices": ({"x": torch.zeros(2, 2), "input_ids": torch.zeros(2, 2, device="meta").long()}, ""),
    "lists with None": ({"input_ids": [[1, 2], None, [3]], "labels": [None]}, ""),
    "mixed lists": ({"input_ids": [[1, 2], ["a"]], "x": [[1], 2, None]}, ""),
    "huge number": ({"x": 10**5000, "many": [10**30, 1]}, ""),
    "huge numbers": ({"x": [3, 10**5000]}, "a number of"),
    "ids of a row": ({"input_ids": [1, 2, 3]}, "row  dict of 1"),
    "ids": ({"input_ids": [[1, 2], [3]], "labels": [[-100, 2], [3]]}, ""),
    "ids that are floats": ({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2, 3)}, ""),
    "odd ids": ({"input_ids": torch.tensor([[-5, 2**40]]), "labels": torch.tensor([[0, 0]])}, ""),
    "no tokens": ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, ""),
    "packed flat": ({
        "input_ids": torch.arange(6).view(1, 6), "cu_seq_lens_q": torch.tensor([0, 2, 6]),
        "labels": torch.tensor([[-100, 1, -100, 3, 4, 5]]),
    }, ""),
    "other shapes": ({
        "input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.ones(2, dtype=torch.int64),
        "attention_mask": torch.ones(2, 1, 3, 3), "position_ids": torch.ones(3, dtype=torch.int64),
    }, ""),
    "lone surrogate": ({"text": "\ud800", "x": ["\ud800"]}, ""),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ITEMS)
def test_any_item_can_be_shown(name):
    item, said = ITEMS[name]
    if name == "ragged":  # torch warns where one is made
        item = {column: make() for column, make in item.items()}
    for shown in (
        tp.show(item),
        tp.show(item, tokenizer="bytes"),
        tp.from_dataset([item]).show(1),
        tp.from_dataset([0, 1]).batch(2).collate(lambda _: item).show(1),
    ):
        text, html = shown.text(), Page(shown).text
        assert len(shown) == 1
        assert text == html
        for line in text.splitlines():
            assert line.isprintable() or not line
    for words in (said,) if isinstance(said, str) else said:
        assert words in repr(tp.show(item))


def test_a_table_of_nothing_has_no_rows():
    assert "row 0" not in repr(tp.show(pa.table({})))


def test_uncollated_batches_are_shown_row_by_row():
    (view,) = tp.from_dataset(SUMS).batch(8).show(1, rows=2).items
    assert (view.rows, len(view.items)) == (8, 2)
    assert [text for *_, text in view.items[1].values] == ["1 + 1 =", " 2"]
    assert "… and 6 more rows" in tp.from_dataset(SUMS).batch(8).show(1, rows=2).text()


def test_classes_are_numbers_and_no_token_ids():
    rows = tp.from_dataset([{"text": "a", "label": "spam"}, {"text": "b", "label": "ham"}])
    pipe = tp.recipe("classification", rows, "bytes", batch_size=2, num_shards=1)
    (view,) = pipe.show(1).items
    (labels,) = [cells for cells in view.values if cells[0] == "labels"]
    assert (labels[3], "note" in str(view.lines)) == ("0 to 1", False)
    assert list(view.texts) == ["input_ids"]


# Text of the data


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\rb", "a\x07", "\u202eabc", "\x9b2J", "\u2028"])
def test_what_a_terminal_would_obey_is_written_as_an_escape(text):
    pipe = tp.from_dataset([{"text": text}])
    for shown in (pipe.show(1), pipe.tokenize("bytes").show(1), pipe.batch(1).show(1)):
        assert escaped(text) in shown.text()
        assert text not in shown.text()
        assert text not in shown._repr_mimebundle_()["text/html"]


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'& [bold]"


@pytest.mark.parametrize("item", [
    {EVIL: EVIL},
    [{EVIL: [EVIL]}],
    {"input_ids": torch.tensor([list(EVIL.encode())])},
    {"x": EVIL.encode()},
    pa.table({EVIL: [EVIL]}),
])  # fmt: skip
def test_html_and_markup_of_the_data_are_text(item):
    shown = tp.show(item, tokenizer="bytes")
    assert Page(shown).text == shown.text()
    assert "<script>" in shown.text()


# Tokenizers


def kinds(tmp_path):
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "tokenizer.json"
    path.write_text(bpe().to_str())
    return {
        "bytes": "bytes",
        "tokenizers": bpe(),
        "tokenizer.json": str(path),
        "transformers": PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token="</s>"),
        "tiktoken": tiktoken_encoding(),
        "sentencepiece": str(sentencepiece_model(tmp_path)),
    }


KINDS = ["bytes", "tokenizers", "tokenizer.json", "transformers", "tiktoken", "sentencepiece"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_decoded_with_every_kind_of_tokenizer(kind, tmp_path):
    tokenizer = kinds(tmp_path)[kind]
    texts = [text for text in TEXTS if text.strip() == text and text and "  " not in text]
    if kind == "sentencepiece":  # which writes texts otherwise
        texts = ["a b", "emoji 🙂"]
    pipe = tp.from_dataset([{"text": text} for text in texts]).tokenize(tokenizer)
    for text, view in zip(texts, pipe.show(len(texts)).items, strict=True):
        pieces = view.texts["input_ids"][0]
        shown = "".join(p.text for p in pieces)
        if all(p.kind == "plain" for p in pieces):
            assert shown == escaped(text)


def test_a_function_that_tokenizes_leaves_numbers():
    pipe = tp.from_dataset([{"text": "ab"}]).tokenize(numbers)
    assert pipe.show(1).items[0].texts["input_ids"][0][0].text == "97 98"


def numbers(texts):
    return [list(text.encode()) for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_no_token_has_are_shown_by_their_number(kind, tmp_path):
    text = load(kinds(tmp_path)[kind]).decode([-100, 10**9, 2**40])
    assert text == "<-100><1000000000><1099511627776>"


def test_a_character_that_is_cut_between_two_pieces_is_not_lost():
    ids = torch.tensor([list("a🙂b".encode())])
    labels = ids.clone()
    labels[:, :3] = -100  # the cut is within the character
    (view,) = tp.show({"input_ids": ids, "labels": labels}, tokenizer="bytes").items
    pieces = [(p.kind, p.text) for p in view.texts["input_ids"][0]]
    assert pieces == [("plain", "a\\xf0\\x9f"), ("loss", "🙂b")]


def test_each_column_is_decoded_by_its_own_tokenizer():
    rows = tp.from_dataset([{"a": "hi", "b": "the"}])
    pipe = rows.tokenize("bytes", {"a": "a_ids"}).tokenize(tiktoken_encoding(), {"b": "b_ids"})
    (view,) = pipe.show(1).items
    decoded = {name: rows[0][0].text for name, rows in view.texts.items()}
    assert decoded == {"a_ids": "hi", "b_ids": "the"}


def test_ids_of_a_mix_are_decoded_by_the_sources_tokenizer():
    parts = {n: tp.from_dataset([{"text": n * 3}] * 8).tokenize("bytes") for n in "ab"}
    (view,) = tp.mix(parts, weights={"a": 1, "b": 1}).batch(4).pad_collate().show(1).items
    assert {row[0].text for row in view.texts["input_ids"]} == {"aaa", "bbb"}


@pytest.mark.parametrize("ragged", ["offsets", "offsets_and_end"])
def test_a_batch_of_flat_lists_has_as_many_rows_as_were_batched(ragged):
    rows = tp.from_dataset([{"items": [1] * n, "weight": [0.5] * n, "y": n} for n in (4, 1, 3)])
    batches = rows.batch(3).collate(ragged=ragged, weights={"items": "weight"})
    (view,) = batches.show(1).items
    assert view.rows == 3


# Limits


def test_large_batches_take_a_bounded_time_and_room():
    ids = torch.ones(10_000, 2_000, dtype=torch.int64)
    shown = tp.show({"input_ids": ids, "labels": ids, "text": ["x" * 10_000] * 10_000})
    assert len(shown.text()) < 6_000
    assert "10,000 rows" in shown.text()


def test_only_the_rows_of_a_large_batch_that_are_shown_are_looked_at():
    class Large(list):
        def __iter__(self):
            raise AssertionError("all of it")

    (view,) = tp.show(Large([{"x": n} for n in range(100_000)]), rows=3).items
    assert (view.rows, len(view.items)) == (100_000, 3)


def test_rows_of_a_million_tokens_show_their_start_and_end_and_what_is_in_the_loss():
    ids = torch.full((2, 1_000_000), 97)
    labels = torch.full_like(ids, -100)
    labels[:, -3:] = 97
    (view,) = tp.show({"input_ids": ids, "labels": labels}, tokenizer="bytes").items
    kinds = [(p.kind, p.tokens) for p in view.texts["input_ids"][0]]
    assert kinds == [("plain", 60), ("left_out", 999_877), ("plain", 60), ("loss", 3)]


def test_a_row_of_many_pieces_is_shown_in_part():
    ids = torch.full((1, 100_000), 97)
    labels = torch.full_like(ids, -100)
    labels[:, ::2] = 97
    (view,) = tp.show({"input_ids": ids, "labels": labels}).items
    assert len(view.texts["input_ids"][0]) < 500
    assert view.texts["input_ids"][0][-1].kind == "left_out"
    assert sum(p.tokens for p in view.texts["input_ids"][0]) == 100_000


# Terminals and notebooks


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colors_only_on_a_terminal(monkeypatch):
    shown = sft().show(1)
    assert repr(shown) == shown.text()
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", Terminal())
    drawn = repr(shown)
    assert "\x1b[32m⟦" in drawn
    assert re.sub("\x1b\\[[0-9;]*m", "", drawn).split() == shown.text(width=80).split()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in repr(shown)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in repr(shown)


@pytest.mark.parametrize("width", [30, 80, 200])
def test_lines_are_as_wide_as_asked(width):
    rows = [{"prompt": "中文和日本語 " * 4, "response": "word " * 20, "x" * 30: 1}] * 8
    pipe = tp.recipe("sft", tp.from_dataset(rows), "bytes", batch_size=2, num_shards=1)
    lines = pipe.show(1).text(width=width).splitlines()
    wide = [len(line) + len(re.findall("[\u4e00-\u9fff]", line)) for line in lines]
    assert len(lines) > 5
    assert max(wide) <= max(width, 60)  # a table has columns that are no narrower
    text = [w for line, w in zip(lines, wide, strict=True) if "row" in line or "中" in line]
    assert max(text) <= width
    whole = "".join(lines[next(k for k, line in enumerate(lines) if "row 0" in line) :])
    assert "中文和日本語" * 4 in re.sub(r"\s", "", whole)


# A loader, and items of any origin


def test_the_next_batches_of_a_loader_are_shown_and_its_position_stays():
    loader = tp.Loader(tp.from_tensors(x=range(20)).shuffle(20).batch(4).collate())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert len(loader.show(2)) == 2
    assert loader.state_dict() == state
    loader.load_state_dict(state)
    (shown,) = loader.show().items
    assert shown.rows == 4
    assert torch.equal(next(iter(loader))["x"], next(batches)["x"])


def test_a_notebook_shows_some_frames_of_a_clip() -> None:
    clips = np.random.default_rng(0).integers(0, 256, (3, 20, 8, 12, 3), dtype=np.uint8)
    rows = tp.from_dataset([{"clip": clip, "x": 1.5} for clip in clips])
    batches = rows.batch(3).collate()
    turned = rows.flip(column="clip").batch(3).collate()
    for pipe, strips in ((rows, 1), (rows.batch(3), 2), (batches, 2), (turned, 2)):
        page = pipe.show(1, rows=2)._repr_mimebundle_()["text/html"]
        assert page.count("<div>") == strips
        assert page.count('title="12 x 8"') == 8 * strips
    assert "<div>" not in rows.normalize(column="clip").show(1)._repr_mimebundle_()["text/html"]
    assert "uint8" in rows.show(1).text()


def test_sound_is_shown_by_length_rate_and_level_and_played_in_a_notebook() -> None:
    import io

    import soundfile

    time, files = np.arange(24_000) / 8000, []
    for loud in (0.5, 0.0):
        files.append(io.BytesIO())
        soundfile.write(files[-1], loud * np.sin(2 * np.pi * 440 * time), 8000, format="WAV")
    rows = tp.from_dataset([{"audio": file.getvalue(), "x": 1} for file in files])
    sounds = rows.decode_audio(sampling_rate=16_000, output_column="input_values")
    shown = sounds.show(2)
    assert "3.00 s at 16,000 Hz, -9.0 dB  █" in shown.text()
    assert "3.00 s at 16,000 Hz, silence" in shown.text()
    broken = sounds.map(lambda row: {**row, "input_values": row["input_values"] * np.nan})
    assert "3.00 s at 16,000 Hz, NaN or infinity" in broken.show(1).text()
    page = shown._repr_mimebundle_()["text/html"]
    assert page.count('<audio controls src="data:audio/wav;base64,') == 2
    assert page.count('title="400 x 96"') == 2
    batch = sounds.batch(2).pad_collate().show()
    assert "up to 3.00 s at 16,000 Hz, -9.0 dB" in batch.text()
    assert batch._repr_mimebundle_()["text/html"].count("<audio") == 2
    assert "Hz" not in rows.decode_audio().show().text()  # at any rate
