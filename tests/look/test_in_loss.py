"""A token is marked where it is in the loss, in every layout of labels, and its row is shown in pieces.

What is marked is compared with what the loss of the layout counts: each position's guess at a token is made
worse, and the tokens whose guess the loss asks for are those that are marked.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import trainpipes as tp
from tokenizer_fixtures import TEXTS, bpe, bracketed
from trainpipes.errors import escaped
from trainpipes.look.decoded import KnownIds, pieces_of, token_grids
from trainpipes.tokenizers.adapters import load

V = 300
ENGINES = {"bytes": load("bytes"), "bpe": load(bpe())}


def next_token_loss(scores, labels):
    """As models of transformers have it: the scores at t are compared with the label of t + 1."""
    return cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def marked(view, name=None, row=0):
    """The text that is marked as in the loss in a row."""
    (rows,) = [rows for column, rows in view.texts.items() if name in (None, column)]
    return [piece.text for piece in rows[row] if piece.kind in ("loss", "masked")]


def only(pipe):
    (view,) = pipe.show(1).items
    return view


def counted(loss, shape):
    """The positions whose scores the loss is about."""
    scores = torch.zeros(*shape, V, requires_grad=True)
    loss(scores).backward()
    return (scores.grad.abs().sum(-1) > 0).numpy()


def grids_of(batch, engine=None):
    return token_grids(batch, KnownIds({"input_ids": engine}))


def varied():
    return tp.from_dataset([{"prompt": "ask", "response": " say" * k} for k in range(1, 9)])


def ids_of(rows):
    return torch.tensor(rows)


def test_the_first_token_of_a_row_is_not_in_the_loss_though_it_has_a_label():
    ids = ids_of([[5, 6, 7, 8]])
    (grid,) = grids_of({"input_ids": ids, "labels": ids.clone()})
    assert grid.layout == "aligned"
    assert grid.in_loss.tolist() == [[False, True, True, True]]
    asked = counted(lambda scores: next_token_loss(scores, ids), (1, 4))
    assert asked[:, :-1].tolist() == grid.in_loss[:, 1:].tolist()  # the guess at t + 1 is made at t


def test_labels_at_their_tokens_mark_what_the_shifted_loss_counts():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (8, 20), generator=generator)
    labels = torch.where(torch.rand(8, 20, generator=generator) < 0.4, ids, -100)
    (grid,) = grids_of({"input_ids": ids, "labels": labels})
    asked = counted(lambda scores: next_token_loss(scores, labels), (8, 20))
    assert np.array_equal(grid.in_loss[:, 1:], asked[:, :-1])
    assert grid.loss_count == int((labels[:, 1:] != -100).sum())


@pytest.mark.parametrize("start", [0, 1])
def test_labels_that_are_shifted_already_are_shown_by_themselves(start):
    whole = torch.tensor([list(b"abcdefgh")])
    labels = whole[:, 1:].clone()
    labels[:, :start] = -100
    shown = tp.show({"input_ids": whole[:, :-1], "labels": labels}, tokenizer="bytes")
    assert marked(shown.items[0], "input_ids") == []
    if start:  # which may be classes of tokens
        assert len(shown.items[0].texts) == 1
        return
    assert marked(shown.items[0], "labels") == ["bcdefgh"]
    assert "the targets are a text of their own" in shown.items[0].lines[1]


def test_masked_tokens_are_in_the_loss_where_they_stand_and_the_first_one_too():
    ids, labels = ids_of([[99, 6, 7, 99]]), ids_of([[5, -100, 7, 8]])
    (grid,) = grids_of({"input_ids": ids, "labels": labels})
    assert grid.layout == "masked"
    asked = counted(lambda scores: cross_entropy(scores[0], labels[0]), (1, 4))
    assert np.array_equal(grid.in_loss, asked)
    assert grid.truth.tolist() == labels.tolist()


FULL = {"input_ids": [[5, 6, 7, 8]], "labels": [[5, 6, 7, 8]]}
#: Of a batch: the layout of its last grid, and what is in the loss there.
GRIDS = {
    "a mask alone": (
        {"input_ids": [[5, 6, 7]], "completion_mask": [[1, 0, 1]]}, "mask", [[False, False, True]]
    ),
    "a mask takes labels away": (
        {**FULL, "loss_mask": [[1, 1, 0, 1]]}, "aligned", [[False, True, False, True]]
    ),
    "targets of an encoder-decoder, from the first token on": (
        {"input_ids": [[5, 6, 7]], "labels": [[8, 9, 2, -100]]}, "own", [[True, True, True, False]]
    ),
    "targets that happen to be as long as the prompt": (
        {"input_ids": [[5, 6, 7]], "labels": [[8, 9, -100]]}, "own", [[True, True, False]]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_what_is_in_the_loss_follows_from_the_layout(name):
    batch, layout, in_loss = GRIDS[name]
    *prompts, grid = grids_of({column: ids_of(rows) for column, rows in batch.items()})
    assert (grid.layout, grid.in_loss.tolist()) == (layout, in_loss)
    assert len(prompts) == (layout == "own")
    assert all(prompt.in_loss is None for prompt in prompts)
    assert layout != "own" or grid.padding == 1


def test_classes_of_tokens_are_no_text():
    batch = {"input_ids": ids_of([[101, 2054, 3000, 102]]), "labels": ids_of([[-100, 3, 0, -100]])}
    text = tp.show(batch, tokenizer="bytes").text()
    assert "labels     tensor int64  [1, 4]  -100 to 3" in text
    assert "⟦" not in text


def test_labels_on_padding_and_nothing_in_the_loss_are_told():
    ids = ids_of([[5, 6, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": ids_of([[1, 1, 0, 0]])}
    for labels, said in (
        (ids, "2 labels on padding are in the loss: make them -100"),
        (torch.full_like(ids, -100), "no token is in the loss"),
    ):
        (view,) = tp.show({**batch, "labels": labels}).items
        assert view.lines[1:] == [f"note: input_ids: {said}"]


# The recipes


def pairs(rows=8):
    return tp.from_dataset([{"prompt": f"ask {k}", "response": f" say {k}"} for k in range(rows)])


@pytest.mark.parametrize(
    "tokenizer", ["bytes", bpe(), bracketed()], ids=["bytes", "bpe", "brackets"]
)
def test_sft_learns_the_response_and_its_end(tokenizer):
    end = "<eos>" if tokenizer == "bytes" else "</s>"
    batch = tp.recipe("sft", pairs(), tokenizer, batch_size=4, num_shards=1)
    view = only(batch)
    for row in range(4):
        (text,) = marked(view, row=row)
        assert text.startswith(" say ")
        assert text.endswith(end)


def with_targets(rows, tokenizer):
    """Pairs with targets that end with the pad token."""
    columns = {"prompt": "input_ids", "response": "target_ids"}
    return rows.tokenize(tokenizer, columns, add_eos=True).batch(4).pad_collate()


def test_seq2seq_learns_all_of_the_response():
    view = only(with_targets(pairs(), "bytes"))
    assert marked(view, "input_ids") == []
    assert marked(view, "target_ids")[0].startswith(" say ")
    hf = only(tp.recipe("seq2seq", pairs(), "bytes", batch_size=4, num_shards=1))
    assert marked(hf, "labels")[0].startswith(" say ")


def test_preference_learns_both_responses():
    rows = [{"prompt": "ask", "chosen": " yes", "rejected": " no, never"}] * 4
    view = only(tp.recipe("preference", tp.from_dataset(rows), "bytes", batch_size=4, num_shards=1))
    assert marked(view, "chosen_input_ids") == [" yes<eos>"]
    assert marked(view, "rejected_input_ids") == [" no, never<eos>"]


def test_packed_documents_are_separate_and_their_first_tokens_are_not_in_the_loss():
    texts = tp.from_dataset([{"text": f"text {k}"} for k in range(9)])
    options = {"max_length": 24, "batch_size": 2, "epochs": 1, "num_shards": 1}
    view = only(tp.recipe("pretrain", texts, "bytes", **options))
    kinds = [(p.kind, p.text, p.tokens) for p in view.texts["input_ids"][0]]
    assert [kind for kind, *_ in kinds] == [
        "plain", "loss", "document", "plain", "loss", "document", "plain", "loss", "padding"
    ]  # fmt: skip
    assert [text for kind, text, _ in kinds if kind == "plain"] == ["t", "t", "t"]
    assert kinds[-1] == ("padding", "", 3)


def test_masked_tokens_are_shown_with_what_they_were():
    rows = tp.from_dataset([{"text": "some words to hide " * 6}] * 4)
    options = {"mask_token_id": 0, "special_ids": [1, 2, 3], "vocab_size": 800}
    view = only(rows.tokenize(bpe()).mask_tokens(0.3, **options).batch(2).pad_collate())
    hidden = [p for row in view.texts["input_ids"] for p in row if p.kind == "masked"]
    assert "labels are the tokens that were hidden" in view.lines[0]
    assert all(p.tokens == 1 and p.truth for p in hidden)
    assert {p.text for p in hidden} >= {"<unk>"}
    whole = "".join(p.truth or p.text for p in view.texts["input_ids"][0])
    assert whole == "some words to hide " * 6


def test_a_tokenizer_that_pads_with_its_end_token_ends_once():
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token="</s>", pad_token="</s>")
    view = only(with_targets(varied(), tokenizer))
    for row in range(4):
        (text,) = marked(view, "target_ids", row)
        assert text.count("</s>") == 1
    assert "padding" in view.lines[1]


# Pieces


@given(
    text=st.one_of(
        st.sampled_from(TEXTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
    ),
    marks=st.lists(st.booleans(), min_size=300, max_size=300),
    kind=st.sampled_from(sorted(ENGINES)),
)
def test_pieces_together_are_the_text(text, marks, kind):
    engine = ENGINES[kind]
    ids = list(text.encode()) if kind == "bytes" else bpe().encode(text).ids
    ids = torch.tensor([[*ids[:300], 65]])
    labels = torch.where(torch.tensor([(marks * 4)[: ids.shape[1]]]), ids, -100)
    (grid,) = grids_of({"input_ids": ids, "labels": labels}, engine)
    pieces = pieces_of(grid, 0, most=10_000)
    assert sum(piece.tokens for piece in pieces) == ids.shape[1]
    assert sum(piece.tokens for piece in pieces if piece.kind == "loss") == grid.loss_count
    whole = escaped(engine.decode(ids[0].tolist()))
    # A character that is cut is whole in the piece where it ends, and told by its bytes before that.
    joined = "".join(piece.text for piece in pieces)
    if "\\x" not in joined and "\ufffd" not in joined:
        assert joined == whole


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), left=st.booleans(), data=st.data()
)
def test_padding_is_counted_and_not_printed(lengths, left, data):
    longest = max(lengths)
    mask = np.zeros((len(lengths), longest), dtype=np.int64)
    for row, length in enumerate(lengths):
        mask[row, longest - length :] = left
        mask[row, :length] |= not left
    ids = torch.full(mask.shape, 97)
    labels = torch.full(mask.shape, -100)
    for row, length in enumerate(lengths):
        count = data.draw(st.integers(0, length))
        place = slice(longest - count, None) if left else slice(length - count, length)
        labels[row, place] = 97
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.tensor(mask)}
    grids = grids_of(batch, ENGINES["bytes"])
    if not longest:
        assert grids == []
        return
    (grid,) = grids
    assert grid.padding == mask.size - mask.sum()
    for row, length in enumerate(lengths):
        pieces = pieces_of(grid, row)
        assert sum(p.tokens for p in pieces if p.kind == "padding") == longest - length
        assert "".join(p.text for p in pieces) == "a" * length
        assert sum(p.kind == "padding" for p in pieces) <= 1


@given(st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=5), min_size=1, max_size=5))
def test_packed_documents_are_as_many_as_there_are(rows):
    longest = max(1, max(map(sum, rows)))
    segments = np.zeros((len(rows), longest), dtype=np.int64)
    positions = np.zeros_like(segments)
    for row, documents in enumerate(rows):
        at = 0
        for number, length in enumerate(documents):
            segments[row, at : at + length] = number + 1
            positions[row, at : at + length] = np.arange(length)
            at += length
    ids = torch.full(segments.shape, 97)
    batch = {"input_ids": ids, "position_ids": torch.tensor(positions)}
    told = [
        {**batch, "segment_ids": torch.tensor(segments)},
        {**batch, "attention_mask": torch.tensor(segments > 0).int()},
    ]
    for one in told:
        (grid,) = grids_of(one)
        for row, documents in enumerate(rows):
            found = pieces_of(grid, row)
            assert [p.tokens for p in found if p.kind == "plain"] == documents
            assert sum(p.kind == "document" for p in found) == max(0, len(documents) - 1)
