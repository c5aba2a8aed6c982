"""The recipe vision_chat: the processor's own batches, labels, bad rows, packing; on small random models."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

import trainpipes as tp
from trainpipes.config import loads
from trainpipes.testing import digest
from trainpipes.tokenizers.chat import messages_of
from trainpipes_recipes import vision_chat
from trainpipes_recipes.vision import Processor
from trainpipes_recipes.vision_rows import NoPicture, decoded, size_of
from visions import FAMILIES, jpeg, model_of, processor_of, talks

ROWS = talks(23)
TABLE = pa.Table.from_pylist(ROWS)
ONE: dict[str, Any] = {"num_shards": 1, "train": False}


@pytest.fixture(autouse=True)
def one_thread(torch_as_before: None) -> None:
    torch.set_num_threads(1)


def seen(
    rows: Any = TABLE, family: str = "llava", processor: Any = None, **options: Any
) -> tp.Pipeline:
    """The recipe over files, rows or a pipeline of rows; in their order if nothing else is said."""
    if isinstance(rows, pa.Table | list):
        rows = tp.from_arrow(rows) if isinstance(rows, pa.Table) else tp.from_dataset(rows)
    return vision_chat(rows, processor or processor_of(family), **{**ONE, **options})


def opened(row: dict[str, Any]) -> list[Any]:
    return [Image.open(io.BytesIO(one["bytes"])).convert("RGB") for one in row["images"]]


def own_batch(family: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the processor makes by itself."""
    processor = processor_of(family)
    texts = [processor.apply_chat_template(messages_of(row["messages"])) for row in rows]
    pictures = [opened(row) for row in rows]
    return dict(
        processor(
            images=pictures if any(pictures) else None, text=texts, padding=True,
            padding_side="right", return_tensors="pt",
        )
    )  # fmt: skip


def said(family: str, batch: dict[str, Any], row: int) -> str:
    labels = batch["labels"][row]
    return str(processor_of(family).tokenizer.decode(labels[labels != -100]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_the_processors_own_and_what_the_assistant_says(family: str) -> None:
    batches = list(seen(family=family, batch_size=5))
    assert [len(batch["labels"]) for batch in batches] == [5, 5, 5, 5, 3]
    for number, batch in enumerate(batches):
        rows = ROWS[5 * number : 5 * number + 5]
        labels = batch.pop("labels")
        own = own_batch(family, rows)
        assert batch.keys() == own.keys()
        for name, value in own.items():
            assert batch[name].dtype == value.dtype
            assert torch.equal(batch[name], value), name
        kept = labels != -100
        assert torch.equal(labels[kept], own["input_ids"][kept])
        for place, row in enumerate(rows):
            words = [
                part["text"] + "<|im_end|>\n"
                for message in row["messages"]
                if message["role"] == "assistant"
                for part in message["content"]
            ]
            assert said(family, {"labels": labels}, place) == "".join(words)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_without_marks_gives_the_same_labels_but_for_the_line_end(family: str) -> None:
    marked, plain = (
        seen(processor=processor_of(family, own), batch_size=9).peek() for own in (True, False)
    )
    assert torch.equal(marked["input_ids"], plain["input_ids"])
    for row in range(9):
        whole = said(family, marked, row)
        assert said(family, plain, row) == whole.replace("<|im_end|>\n", "<|im_end|>")


def test_rows_without_any_picture_need_no_column_of_them() -> None:
    rows = [{"prompt": "One?", "response": "Two."}] * 3
    (batch,) = seen(rows, batch_size=3)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert said("llava", batch, 2) == "Two.<|im_end|>\n"


class Uncounted:
    """A processor that does not count the tokens of pictures."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        if name in ("_processor", "_get_num_multimodal_tokens") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._processor, name)

    def __call__(self, **options: Any) -> Any:
        return self._processor(**options)


def test_a_processor_that_does_not_count_is_called_for_each_row() -> None:
    pipes = seen(processor=Uncounted(processor_of("idefics3"))), seen(family="idefics3")
    rows = [list(tp.Pipeline(pipe.stages[:-2])) for pipe in pipes]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_balanced_batches_of_a_step_cost_about_the_same_on_all_ranks(packed: bool) -> None:
    options: dict[str, Any] = {"batch_size": 2, "num_shards": 4, "seed": 1}
    if packed:
        options |= {"packed": True, "max_length": 300, "batch_size": 1}

    def costs(**more: Any) -> list[int]:
        rows = tp.from_dataset(talks(161))
        pipe = vision_chat(rows, processor_of("qwen2_vl"), **options, **more)
        if packed:  # where a conversation begins, positions of text begin again
            starts = [np.flatnonzero(b["position_ids"][0].ravel() == 0).tolist() for b in pipe]
            return [sum(n * n for n in np.diff([*s, 300]).tolist()) for s in starts]
        return [batch["input_ids"].numel() for batch in pipe]

    def share_of_longest(costs: list[int]) -> float:
        steps = np.array(costs[: len(costs) // 4 * 4]).reshape(-1, 4)
        return float((steps.max(1) / steps.mean(1)).mean())

    balanced, plain = costs(balance=8), costs()
    assert sorted(balanced) == sorted(plain)
    assert share_of_longest(balanced) < share_of_longest(plain) - 0.05
    evaluated = vision_chat(
        tp.from_dataset(talks(161)), processor_of("qwen2_vl"), train=False, balance=8, **options
    )
    assert "balance" not in {stage.name for stage in evaluated.stages}


def test_batches_of_a_budget_of_tokens_hold_all_rows() -> None:
    pipe = seen(family="qwen2_vl", max_tokens=400, num_shards=2, seed=1, train=True)
    sizes = [tuple(batch["input_ids"].shape) for batch in pipe]
    assert sum(rows for rows, _ in sizes) == len(ROWS)
    assert max(rows * length for rows, length in sizes) <= 400


# A prompt and a suffix, without a chat


PAIRS = [
    {"prompt": f"caption {n}" * (1 + n % 3), "response": f"a cat {n}" * (1 + n % 2), "images": some}
    for n, some in enumerate([[jpeg(n, 30 + n), jpeg(n + 1)][: 1 + n % 2] for n in range(11)])
]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_prompt_and_a_suffix_are_the_processors_own_batch() -> None:
    processor = processor_of("paligemma")
    batches = list(seen(PAIRS, "paligemma", batch_size=4))
    for number, batch in enumerate(batches):
        rows = PAIRS[4 * number : 4 * number + 4]
        own = processor(
            images=[[decoded(one) for one in row["images"]] for row in rows],
            text=["<image>" * len(row["images"]) + row["prompt"] for row in rows],
            suffix=[row["response"] for row in rows], padding=True, padding_side="right",
            return_tensors="pt",
        )  # fmt: skip
        assert batch.keys() == own.keys() >= {"labels", "token_type_ids", "pixel_values"}
        for name, value in own.items():
            assert batch[name].dtype == value.dtype
            assert torch.equal(batch[name], value), name
        for place, row in enumerate(rows):
            assert said("paligemma", batch, place) == f"{row['response']}<eos>"
    loss = model_of("paligemma")(**{**batch, "pixel_values": batch["pixel_values"].double()}).loss
    assert loss.isfinite()


@pytest.mark.parametrize("family", [*FAMILIES, "paligemma"])
def test_the_length_of_a_row_is_known_before_its_pixels(family: str) -> None:
    pipe = seen(PAIRS if family == "paligemma" else TABLE, family, batch_size=1)
    rows = list(tp.Pipeline(pipe.stages[:-2]))
    assert [row["length"] for row in rows] == [batch["input_ids"].shape[1] for batch in pipe]
    assert all(isinstance(one, bytes) for row in rows for one in row["images"])


def test_of_a_processor_with_a_suffix_chats_and_packed_rows_are_refused() -> None:
    with pytest.raises(tp.ConfigError, match=r"packs for .*, got PaliGemmaProcessor"):
        seen(PAIRS, "paligemma", packed=True)
    with pytest.raises(tp.DataError, match="PaliGemmaProcessor takes prompts with a picture"):
        list(seen([{**PAIRS[0], "images": []}], "paligemma"))
    with pytest.raises(tp.DataError, match="takes a prompt and a response, got the roles"):
        list(seen(TABLE, "paligemma"))
    talk = [{"role": "user", "content": "<image>?"},
            {"role": "assistant", "content": "A cat.", "weight": 0}]  # fmt: skip
    row = {"messages": talk, "images": PAIRS[0]["images"]}
    with pytest.raises(tp.DataError, match=r"got one that is not in the loss"):
        list(seen([row], "paligemma"))


def test_a_message_may_stay_out_of_the_loss() -> None:
    talk = [
        {"role": "user", "content": "<image>?"},
        {"role": "assistant", "content": "Bad.", "weight": 0},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "A cat.", "weight": 1},
    ]
    batch = seen(
        [{"messages": talk, "images": PAIRS[0]["images"]}], FAMILIES[0], batch_size=1
    ).peek()
    assert said(FAMILIES[0], batch, 0) == "A cat.<|im_end|>\n"


# Packed


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    given = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.items()
    }
    labels = given.pop("labels")[:, 1:]
    logits = model(**given).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def loss_and_gradients(model: Any, batches: Iterator[Any]) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        total += loss.item()
    found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return total, found


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "sdpa") for family in FAMILIES), ("llava", "eager"), ("qwen2_5_vl", "eager")],
)
def test_packed_rows_have_the_loss_and_gradients_that_they_have_one_by_one(
    family: str, attention: str
) -> None:
    rows, model = TABLE.slice(0, 12), model_of(family, attention)
    packed = seen(rows, family, packed=True, max_length=300, batch_size=2, train=True)
    singly = seen(rows, family, batch_size=1)
    assert all("attention_mask" not in batch for batch in packed)
    loss, gradients = loss_and_gradients(model, iter(packed))
    expected, others = loss_and_gradients(model, iter(singly))
    assert loss == pytest.approx(expected, rel=1e-9)
    assert len(gradients) == len(others) > 40
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


def test_a_packed_batch_says_where_its_rows_begin() -> None:
    count = 0
    for batch in seen(packed=True, max_length=300, batch_size=2, train=True):
        rows, length = batch["input_ids"].shape
        assert length == 300
        assert rows <= 2
        edges = batch["cu_seqlens"]
        assert edges.dtype == torch.int32
        assert edges[[0, -1]].tolist() == [0, rows * length]
        begins = batch["position_ids"].flatten()[edges[:-1].long()]
        assert begins.tolist() == [0] * len(begins)
        assert batch["max_seqlen"] == int(edges.diff().max())
        filled = batch["input_ids"].flatten() != processor_of("llava").tokenizer.pad_token_id
        count += int(filled[edges[:-1].long()].sum())
    assert count == len(ROWS)


def test_options_that_another_makes_void_or_that_are_wrong_are_refused() -> None:
    with pytest.raises(
        tp.ConfigError, match=r"max_tokens. is for rows that are not packed.* got 64"
    ):
        seen(packed=True, max_tokens=64)
    for train in (True, False):
        with pytest.raises(tp.ConfigError, match="window"):
            seen(balance=-1, train=train)


def test_packing_is_refused_for_a_family_of_which_it_is_not_known() -> None:
    class OtherProcessor(Uncounted):
        pass

    told = r"packs for .* Qwen2_5_VL, got OtherProcessor.*max_tokens"
    with pytest.raises(tp.ConfigError, match=told):
        seen(processor=OtherProcessor(processor_of("llava")), packed=True)


# Where pictures come from


def with_paths(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for number, row in enumerate(ROWS):
        names = []
        for place, one in enumerate(row["images"]):
            names.append(f"pictures/{number}-{place}.png")
            (folder / "pictures").mkdir(exist_ok=True)
            (folder / names[-1]).write_bytes(one["bytes"])
        rows.append({"messages": row["messages"], "images": names})
    return rows


def digests(pipe: tp.Pipeline) -> list[str]:
    return [digest(batch) for batch in pipe]


def test_files_of_every_kind_give_the_same_batches(tmp_path: Path) -> None:
    expected = digests(seen(family="qwen2_vl", batch_size=4))

    def found(files: Path) -> list[str]:
        return digests(seen(str(files), "qwen2_vl", batch_size=4))

    pq.write_table(TABLE, tmp_path / "bytes.parquet", row_group_size=5)
    assert found(tmp_path / "bytes.parquet") == expected
    plain = [[one["bytes"] for one in row["images"]] for row in ROWS]
    column = pa.array(plain, pa.list_(pa.binary()))
    pq.write_table(TABLE.set_column(1, "images", column), tmp_path / "plain.parquet")
    assert found(tmp_path / "plain.parquet") == expected
    lines = [json.dumps(row) for row in with_paths(tmp_path)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert found(tmp_path / "rows.jsonl") == expected


@pytest.mark.parametrize("beside", ["", "pictures"])
def test_a_folder_with_a_table_of_its_pictures(beside: str, tmp_path: Path) -> None:
    rows = [row for row in with_paths(tmp_path) if len(row["images"]) == 1]
    for row in rows:
        row["file_name"] = row.pop("images")[0].removeprefix(f"{beside}/")
    lines = [json.dumps(row) for row in rows]
    (tmp_path / beside / "metadata.jsonl").write_text("\n".join(lines))
    whole = [row for row in ROWS if len(row["images"]) == 1]
    expected = digests(seen(tp.from_dataset(whole), "qwen2_vl", batch_size=2))
    folder = str(tmp_path / beside)
    for files in (folder, (folder,)):
        assert digests(seen(files, "qwen2_vl", batch_size=2)) == expected != []


def test_a_tar_has_a_conversation_and_a_picture_for_each_sample(tmp_path: Path) -> None:
    rows = [row for row in ROWS if len(row["images"]) == 1]
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        for number, row in enumerate(rows):
            talk = json.dumps({"messages": row["messages"]}).encode()
            for kind, content in (("json", talk), ("jpg", row["images"][0]["bytes"])):
                member = tarfile.TarInfo(f"{number:03}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    found = digests(seen(str(tmp_path / "rows.tar"), batch_size=4))
    assert found == digests(seen(rows, batch_size=4))


class Guarded(MemoryFileSystem):
    """A store that gives its files to whom has the key."""

    protocol = "guarded"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self, *, key: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.key = key

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace(f"{cls.protocol}://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if self.key != "open sesame":
            raise PermissionError(path)
        return super()._open(path, mode, **options)


class WithoutOptions(Guarded):
    protocol = "bare"
    store: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__(key="open sesame")


def test_storage_options_reach_pictures_at_urls(tmp_path: Path) -> None:
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    fsspec.register_implementation("bare", WithoutOptions, clobber=True)
    key = {"key": "open sesame"}
    Guarded(**key).pipe({"/rows/a.png": jpeg(0), "/rows/b.jpg": jpeg(1)})
    WithoutOptions().pipe("/c.jpg", jpeg(3))
    row = {"prompt": "What?", "response": "A cat."}
    expected = {**row, "images": [jpeg(0), jpeg(1), jpeg(3)]}
    urls = ["guarded://rows/a.png", "guarded://rows/b.jpg"]
    on_disk = tmp_path / "rows.jsonl"
    on_disk.write_text(json.dumps({**row, "images": urls}))
    beside = {**row, "images": ["a.png", urls[1], "bare://c.jpg"]}
    Guarded(**key).pipe("/rows/rows.jsonl", json.dumps(beside).encode())
    found = digests(seen("guarded://rows/rows.jsonl", batch_size=1, storage_options=key))
    assert found == digests(seen([expected], batch_size=1))
    expected["images"].pop()
    pipe = seen(on_disk, batch_size=1, storage_options=key)
    assert digests(pipe) == digests(seen([expected], batch_size=1))
    with pytest.raises(tp.DataError, match=r"guarded://rows/a.png cannot be read \(PermissionE"):
        digests(seen(on_disk, batch_size=1))
    pipe = seen(on_disk, batch_size=1, storage_options=key)
    assert "sesame" not in f"{pipe!r} {pipe.state_at(0)} {pipe.show()}"
    pipe.load_state_dict(seen(on_disk, batch_size=1).state_at(0))


def test_pairs_with_one_picture_and_marks_in_texts_are_conversations_too() -> None:
    content = jpeg(3)
    asked = [{"type": "image"}, {"type": "text", "text": "What?"}]
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": "A cat."}]
    marked = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]
    expected, *others = (
        digests(seen([row], "idefics3", batch_size=1))
        for row in (
            {"messages": talk, "images": [content]},
            {"prompt": "What?", "response": "A cat.", "image": content},
            {"conversations": marked, "image": {"bytes": content, "path": "a.png"}},
        )
    )
    assert others == [expected] * 2


def test_pictures_that_stages_before_it_changed_are_taken_as_arrays() -> None:
    rows = [{"prompt": f"{n}?", "response": "Yes.", "image": jpeg(n, 60, 60)} for n in range(8)]
    changed = tp.from_dataset(rows).decode_image("image", output_column="image")
    changed = changed.random_crop(40, seed=1).flip(seed=2)
    pipe = seen(changed, "qwen2_vl", batch_size=4, num_shards=2, train=True)
    first, second = digests(pipe), digests(pipe)
    assert first != second  # of another epoch
    pipe.load_state_dict(pipe.state_at(0, epoch=0))
    assert digests(pipe) == first


def test_lines_of_json_may_mix_contents_of_text_and_of_parts(tmp_path: Path) -> None:
    row = with_paths(tmp_path)[0]
    system = {"role": "system", "content": "You see."}
    said_too = {"role": "assistant", "content": "A cat."}
    talk = [system, *row["messages"][:1], said_too]
    lines = [{"messages": talk, "images": row["images"]}, {"messages": talk[2:0:-1], "images": []}]
    lines[1]["messages"] = [{"role": "user", "content": "Hm?"}, said_too]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = tp.read_text(tmp_path / "rows.jsonl").map(lambda row: json.loads(row["text"]))
    (batch,) = seen(rows, batch_size=2)
    assert [said("llava", batch, n) for n in range(2)] == ["A cat.<|im_end|>\n"] * 2


# Bad rows


def bad_rows(folder: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    rows = [dict(row) for row in with_paths(folder)]
    several = [number for number, row in enumerate(rows) if row["images"]]
    cut, missing, fewer, text, long, turns = several[:6]
    path = folder / rows[cut]["images"][0]
    path.write_bytes(path.read_bytes()[:-60])
    rows[missing]["images"] = ["pictures/none.png", *rows[missing]["images"][1:]]
    rows[fewer]["images"] = []
    (folder / "pictures" / "text.png").write_text("no picture")
    rows[text]["images"] = ["pictures/text.png", *rows[text]["images"][1:]]
    more = [{"type": "text", "text": "so " * 400}]
    rows[long]["messages"] = [*rows[long]["messages"][:-1], {"role": "assistant", "content": more}]
    rows[turns]["messages"] = rows[turns]["messages"][1:]
    return rows, {
        cut: "truncated", missing: "none.png cannot be read", fewer: "places and 0 pictures",
        text: "no picture that can be read", long: "at most max_length=500 tokens, got 1,",
        turns: "where 'system' or 'user' comes",
    }  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_bad_rows_are_named_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, packed: bool
) -> None:
    rows, bad = bad_rows(tmp_path)
    options: dict[str, Any] = {"family": "qwen2_vl", "max_length": 500, "packed": packed}
    for number, said_of in bad.items():
        path = tmp_path / f"bad-{number}.jsonl"
        path.write_text(json.dumps(rows[number]))
        with pytest.raises(tp.DataError, match=said_of) as caught:
            list(seen(path, **options))
        assert f"bad-{number}.jsonl" in str(caught.value)
        assert "row 0" in str(caught.value)
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with caplog.at_level(logging.WARNING, "trainpipes"):
        batches = list(seen(tmp_path / "rows.jsonl", on_error="skip", **options))
    others = seen([row for number, row in enumerate(ROWS) if number not in bad], **options)
    labels = [sum(int((b["labels"] >= 0).sum()) for b in some) for some in (batches, others)]
    assert labels[0] == labels[1]
    assert "left out" in caplog.text


def asked(text: str | None, image: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    return {"messages": json.dumps(turns), "images": image}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (asked("<image>?", [jpeg(0), jpeg(1)]), "got 1 places and 2 pictures"),
        (asked("<image>? <image>", [jpeg(0)]), "got 2 places and 1 pictures"),
        (asked("?", np.zeros((20, 30, 3), np.uint8)), r"got an array uint8 \[20, 30, 3\]"),
        (asked("?", np.zeros((3, 0, 30), np.uint8)), r"got an array uint8 \[3, 0, 30\]"),
        (asked("?", np.zeros((3, 1, 300), np.uint8)), "refuses the row: absolute aspect ratio"),
        ({"messages": "Is it?", "images": None}, "a text is a conversation in JSON"),
        ({"messages": "[" * 10**6, "images": None}, "a text is a conversation in JSON"),
        ({"messages": "3", "images": None}, "holds lists of messages.* got 3"),
        ({"messages": '["Is it?"]', "images": None}, "holds lists of messages.* got 'Is it"),
        ({"messages": '[{"text": "?"}]', "images": None}, "holds lists of messages"),
        ({"messages": None, "images": None}, "a conversation has no message"),
        (asked(None, jpeg(0)), "message 0 of role 'user' is without content"),
    ],
)
def test_other_bad_rows_are_named_or_left_out(row: dict[str, Any], message: str) -> None:
    rows = [asked("?", jpeg(0)), row]
    with pytest.raises(tp.DataError, match=message) as caught:
        list(seen(rows, "qwen2_vl"))
    assert caught.value.row == 1
    assert [len(batch["labels"]) for batch in seen(rows, "qwen2_vl", on_error="skip")] == [1]


def test_a_null_prompt_is_a_bad_row() -> None:
    rows = [{"prompt": prompt, "response": "Yes.", "image": jpeg(0)} for prompt in ("", None)]
    for family in ("llava", "paligemma"):
        with pytest.raises(
            tp.DataError, match="message 0 of role 'user' is without content"
        ) as caught:
            list(seen(rows, family))
        assert caught.value.row == 1


def test_an_array_is_the_picture_that_its_file_is() -> None:
    """Without transparency, of which each processor would make something else."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 40, 30), dtype=np.uint8)
    for array in (pixels, pixels[:3], pixels[:1]):
        file = io.BytesIO()
        shown = array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0))
        Image.fromarray(shown).save(file, "PNG")
        one, other = (next(iter(seen([asked("?", [p])]))) for p in (array, file.getvalue()))
        assert torch.equal(one["pixel_values"], other["pixel_values"])


def test_a_batch_whose_rows_are_all_damaged_is_left_out() -> None:
    rows = [{"prompt": f"{n}?", "response": "Yes.", "image": jpeg(0)} for n in range(6)]
    for row in rows[2:4]:
        row["image"] = row["image"][:-60]
    pipe = seen(rows, batch_size=2, on_error="skip")
    assert [len(batch["labels"]) for batch in pipe] == [2, 2]


def test_a_quarantine_lists_damaged_pictures(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "response": "Yes.", "image": jpeg(0)} for n in range(6)]
    rows[3]["image"] = rows[3]["image"][:-60]
    pipe = seen(rows, batch_size=2, on_error=tp.Quarantine(tmp_path / "bad", max_share=1))
    assert [len(batch["labels"]) for batch in pipe] == [2, 1, 2]
    (file,) = (tmp_path / "bad").iterdir()
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["row"], line["stage"]) == (3, "vision_batches")


def test_a_quarantine_names_the_file_of_a_damaged_picture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(2):
        row = {"prompt": f"{n}?", "response": "Yes.", "image": jpeg(0)[: -60 * n or None]}
        pq.write_table(pa.table({name: [cell] for name, cell in row.items()}), tmp_path / f"{n}.pq")
    bad = tp.Quarantine(tmp_path / "bad", max_share=1)
    with caplog.at_level(logging.WARNING, "trainpipes"):
        assert len(list(seen(tp.read_parquet(tmp_path / "*.pq"), on_error=bad))) == 1
    (file,) = (tmp_path / "bad").iterdir()
    line = json.loads(file.read_text())
    assert (line["file"].rpartition("/")[2], line["row"]) == ("1.pq", 0)
    assert "1.pq" in caplog.text


# What a state knows


def test_a_state_of_another_processor_is_refused_by_name() -> None:
    state = seen(num_shards=2).state_at(1)
    told = r"vision_rows/processor.*LlavaProcessor.*Qwen2VLImages"
    with pytest.raises(tp.StateError, match=told):
        seen(family="qwen2_vl", num_shards=2).load_state_dict(state)
    seen(num_shards=2).load_state_dict(state)


def test_a_processor_is_known_by_content_backend_and_version() -> None:
    known = Processor(processor_of("idefics3")).fingerprint()
    assert known["backend"] == "pil"
    assert known["transformers"].startswith("5.")
    assert known["pictures"] == "Idefics3ImageProcessorPil"
    assert known == Processor(processor_of("idefics3")).fingerprint()


def test_a_folder_is_the_same_processor_as_the_object(tmp_path: Path) -> None:
    processor_of("llava").save_pretrained(tmp_path)
    by_folder = seen(processor=str(tmp_path), batch_size=4)
    assert digests(by_folder) == digests(seen(batch_size=4))


def test_other_processors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tp.ConfigError, match=r"processor. must be a processor of transformers"):
        seen(processor=7)
    with pytest.raises(tp.ConfigError, match="AutoProcessor makes none of"):
        list(seen(processor=str(tmp_path)))


# Pictures


def test_a_picture_on_its_side_is_measured_upright() -> None:
    out = io.BytesIO()
    picture = Image.fromarray(np.zeros((20, 50, 3), np.uint8))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(out, "JPEG", exif=exif)
    assert size_of(out.getvalue()) == (50, 20)
    assert decoded(out.getvalue()).size == (20, 50)


def test_what_is_no_picture_is_said() -> None:
    with pytest.raises(NoPicture, match="no picture that can be read"):
        size_of(b"text")
    with pytest.raises(tp.DataError, match=r"a picture is bytes, a path, .* got 7"):
        list(seen([{"prompt": "a", "response": "b", "image": 7}]))


def test_lists_of_pictures_are_changed_one_by_one_and_the_same_again() -> None:
    rows = tp.from_dataset([{"images": [jpeg(n + k) for k in range(n % 3)]} for n in range(6)])
    alone = tp.from_dataset([{"images": jpeg(n)} for n in range(6)])

    def changed(pipe: tp.Pipeline) -> list[Any]:
        pipe = pipe.decode_image("images", output_column="images", on_error="skip")
        return [row["images"] for row in pipe.random_crop(9, column="images").flip(column="images")]

    found, again, ones = changed(rows), changed(rows), changed(alone)
    assert [len(images) for images in found] == [0, 1, 2, 0, 1, 2]
    for row in range(6):
        assert [one.tolist() for one in found[row]] == [one.tolist() for one in again[row]]
        if found[row]:  # the first draws what the only one would
            assert np.array_equal(found[row][0], ones[row])
    assert not np.array_equal(found[2][0], found[2][1])


@pytest.mark.parametrize("packed", [False, True])
def test_show_prints_the_conversations(packed: bool) -> None:
    shown = " ".join(str(seen(packed=packed, max_length=300).show()).split())
    assert "<|im_start|>user\\n‹5 <image>›What is number 0?" in shown
    assert ("2 pictures: 49 x 63, 49 x 30" if packed else "1 picture: 40 x 30") in shown
    assert "⟦It is" in shown
    assert "pixel_values" in shown


@pytest.mark.parametrize("packed", [False, True])
def test_a_notebook_shows_small_pictures(packed: bool) -> None:
    wide = Image.fromarray(np.full((60, 300, 3), (250, 0, 0), np.uint8))
    out = io.BytesIO()
    wide.save(out, "PNG")
    rows = [{"prompt": "What?", "response": "Red.", "images": [out.getvalue(), jpeg(1)]}]
    rows.append({"prompt": "What?", "response": "Nothing.", "images": [jpeg(1)[:-60]]})
    shown = (
        seen(rows, "qwen2_vl", packed=packed, on_error="skip")
        .show()
        ._repr_mimebundle_()["text/html"]
    )
    found = re.findall(r'<img src="data:image/png;base64,(\S+)" title="([0-9x ]+)">', shown)
    assert [title for _, title in found] == ["300 x 60", "40 x 30"]
    pictures = [Image.open(io.BytesIO(base64.b64decode(data))) for data, _ in found]
    assert [one.size for one in pictures] == [(96, 19), (40, 30)]
    assert pictures[0].getpixel((50, 10)) == (250, 0, 0)
    assert shown.count("<div>batch 0, row 0: ") == 1


def test_the_recipe_is_written_and_read_as_yaml(tmp_path: Path) -> None:
    processor_of("llava").save_pretrained(tmp_path / "processor")
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    named = {"files": str(tmp_path / "rows.parquet"), "processor": str(tmp_path / "processor")}
    pipe = tp.recipe("vision_chat", **named, batch_size=3, num_shards=2)
    text = pipe.to_yaml()
    assert text.split("\n")[1] == "recipe: vision_chat"
    assert digests(loads(text)) == digests(pipe)
