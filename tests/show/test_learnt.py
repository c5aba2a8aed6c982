"""A token is marked as learnt where it is a target of the loss, in every layout of labels.

What is marked is compared with what the loss of the layout counts: each position's guess at a token is made
worse, and the tokens whose guess the loss asks for are those that are marked.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

import trainpipes as tp
from tokenizer_fixtures import bpe, bracketed
from trainpipes.look.preview.preview import preview
from trainpipes_recipes.training.losses import next_token_loss, token_loss

V = 300


def marked(view, name=None, row=0):
    """The text that is marked as learnt in a row."""
    (one,) = [r for r in view.texts if r.row == row and (name is None or r.name == name)]
    return [piece.text for piece in one.pieces if piece.kind == "learnt"]


def only(pipe):
    (view,) = pipe.show(1).items
    return view


def counted(loss, shape):
    """The positions whose scores the loss is about."""
    scores = torch.zeros(*shape, V, requires_grad=True)
    loss(scores).backward()
    return (scores.grad.abs().sum(-1) > 0).numpy()


def grids_of(batch):
    from trainpipes.look.preview.known_ids import KnownIds
    from trainpipes.look.preview.token_grids import token_grids

    return token_grids(batch, KnownIds())


def varied():
    return tp.from_dataset([{"prompt": "ask", "response": " say" * k} for k in range(1, 9)])


def ids_of(rows):
    return torch.tensor(rows)


def test_the_first_token_of_a_row_is_not_learnt_though_it_has_a_label():
    ids = ids_of([[5, 6, 7, 8]])
    (grid,) = grids_of({"input_ids": ids, "labels": ids.clone()})
    assert grid.layout == "aligned"
    assert grid.learnt.tolist() == [[False, True, True, True]]
    asked = counted(lambda scores: next_token_loss(scores, ids), (1, 4))
    assert asked[:, :-1].tolist() == grid.learnt[:, 1:].tolist()  # the guess at t + 1 is made at t


def test_labels_at_their_tokens_mark_what_the_shifted_loss_counts():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (8, 20), generator=generator)
    labels = torch.where(torch.rand(8, 20, generator=generator) < 0.4, ids, -100)
    (grid,) = grids_of({"input_ids": ids, "labels": labels})
    asked = counted(lambda scores: next_token_loss(scores, labels), (8, 20))
    assert np.array_equal(grid.learnt[:, 1:], asked[:, :-1])
    assert grid.learnt_count == int((labels[:, 1:] != -100).sum())


def test_labels_that_are_shifted_already_mark_the_token_after_their_place():
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(0, V, (8, 21), generator=generator)
    ids, targets = whole[:, :-1], whole[:, 1:].clone()
    targets[torch.rand(8, 20, generator=generator) < 0.5] = -1
    (grid,) = grids_of({"input_ids": ids, "targets": targets})
    assert grid.layout == "shifted"
    asked = counted(
        lambda scores: F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-1),
        (8, 20),
    )
    assert np.array_equal(grid.learnt[:, 1:], asked[:, :-1])
    assert np.array_equal(grid.beyond >= 0, asked[:, -1])
    assert grid.beyond[asked[:, -1]].tolist() == whole[:, -1][torch.tensor(asked[:, -1])].tolist()


def test_the_last_target_of_shifted_labels_is_shown_though_it_is_no_input():
    x = torch.tensor([list(b"abc")])
    (view,) = preview([(x, torch.tensor([list(b"bcd")]))]).items
    pieces = [(p.kind, p.text) for p in view.texts[0].pieces]
    assert pieces == [("plain", "97"), ("learnt", "98 99"), ("learnt", "100")]
    assert view.counts[0].learnt == 3


def test_shifted_labels_of_padded_rows_end_with_the_row():
    ids = ids_of([[5, 6, 7, 0, 0]])
    labels = ids_of([[6, 7, 9, -100, -100]])
    mask = ids_of([[1, 1, 1, 0, 0]])
    (grid,) = grids_of({"input_ids": ids, "labels": labels, "attention_mask": mask})
    assert grid.layout == "shifted"
    assert grid.learnt.tolist() == [[False, True, True, False, False]]
    assert grid.beyond.tolist() == [9]


def test_masked_tokens_are_learnt_where_they_stand_and_the_first_one_too():
    ids, labels = ids_of([[99, 6, 7, 99]]), ids_of([[5, -100, 7, 8]])
    (grid,) = grids_of({"input_ids": ids, "labels": labels})
    assert grid.layout == "masked"
    asked = counted(lambda scores: token_loss(scores, labels), (1, 4))
    assert np.array_equal(grid.learnt, asked)
    assert grid.truth.tolist() == labels.tolist()


def test_a_loss_mask_without_labels_marks_its_own_tokens():
    batch = {"input_ids": ids_of([[5, 6, 7]]), "completion_mask": ids_of([[1, 0, 1]])}
    (grid,) = grids_of(batch)
    assert (grid.layout, grid.learnt.tolist()) == ("mask", [[False, False, True]])


def test_a_loss_mask_beside_labels_takes_some_of_them_away():
    ids = ids_of([[5, 6, 7, 8]])
    batch = {"input_ids": ids, "labels": ids.clone(), "loss_mask": ids_of([[1, 1, 0, 1]])}
    (grid,) = grids_of(batch)
    assert grid.learnt.tolist() == [[False, True, False, True]]


def test_targets_of_an_encoder_decoder_are_learnt_from_the_first_token_on():
    batch = {"input_ids": ids_of([[5, 6, 7]]), "labels": ids_of([[8, 9, 2, -100]])}
    prompt, target = grids_of(batch)
    assert prompt.learnt is None
    assert (target.layout, target.learnt.tolist()) == ("own", [[True, True, True, False]])
    assert target.padding == 1


def test_targets_that_happen_to_be_as_long_as_the_prompt_are_a_text_of_their_own():
    _, target = grids_of({"input_ids": ids_of([[5, 6, 7]]), "labels": ids_of([[8, 9, -100]])})
    assert target.layout == "own"


def test_classes_of_tokens_are_no_tokens():
    batch = {"input_ids": ids_of([[101, 2054, 3000, 102]]), "labels": ids_of([[-100, 3, 0, -100]])}
    (view,) = preview([batch]).items
    assert [p.truth for p in view.texts[0].pieces if p.kind == "learnt"] == ["3", "0"]


def test_labels_on_padding_are_told():
    ids = ids_of([[5, 6, 0, 0]])
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": ids_of([[1, 1, 0, 0]])}
    (view,) = preview([batch]).items
    assert view.notes[0].startswith("input_ids: 2 targets are on padding, and the loss counts them")


def test_nothing_learnt_is_told():
    ids = ids_of([[5, 6, 7]])
    (view,) = preview([{"input_ids": ids, "labels": torch.full_like(ids, -100)}]).items
    assert view.notes == ("input_ids: no token is learnt",)


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


def test_seq2seq_learns_all_of_the_response():
    view = only(tp.recipe("seq2seq", pairs(), "bytes", batch_size=4, num_shards=1))
    assert marked(view, "input_ids") == []
    assert marked(view, "target_ids")[0].startswith(" say ")
    hf = only(tp.recipe("seq2seq", pairs(), "bytes", batch_size=4, num_shards=1, hf_names=True))
    assert marked(hf, "labels")[0].startswith(" say ")


def test_preference_learns_both_responses():
    rows = [{"prompt": "ask", "chosen": " yes", "rejected": " no, never"}] * 4
    view = only(tp.recipe("preference", tp.from_dataset(rows), "bytes", batch_size=4, num_shards=1))
    assert marked(view, "chosen_input_ids") == [" yes<eos>"]
    assert marked(view, "rejected_input_ids") == [" no, never<eos>"]


def test_packed_documents_are_separate_and_their_first_tokens_are_not_learnt():
    texts = tp.from_dataset([{"text": f"text {k}"} for k in range(9)])
    view = only(
        tp.recipe("pretrain", texts, "bytes", max_length=24, batch_size=2, epochs=1, num_shards=1)
    )
    kinds = [(p.kind, p.text, p.tokens) for p in view.texts[0].pieces]
    assert [kind for kind, *_ in kinds] == [
        "plain", "learnt", "document", "plain", "learnt", "document", "plain", "learnt", "padding"
    ]  # fmt: skip
    assert [text for kind, text, _ in kinds if kind == "plain"] == ["t", "t", "t"]
    assert kinds[-1] == ("padding", "", 3)
    assert view.texts[0].documents == 3


def test_token_files_have_labels_everywhere_and_the_first_token_is_not_learnt(tmp_path):
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "train.bin")
    pipe = tp.recipe("tokens", tmp_path / "train.bin", dtype="uint16", max_length=16, batch_size=2, epochs=1,
                     num_shards=1)  # fmt: skip
    view = only(pipe)
    assert view.counts[0].learnt == 2 * 15
    assert view.texts[0].pieces[0].kind == "plain"
    assert view.texts[0].pieces[0].tokens == 1


def test_masked_tokens_are_shown_with_what_they_were():
    rows = tp.from_dataset([{"text": "some words to hide " * 6}] * 4)
    tokens = rows.tokenize(bpe()).mask_tokens(
        0.3, mask_token_id=0, special_ids=[1, 2, 3], vocab_size=800
    )
    view = only(tokens.batch(2).pad_collate())
    learnt = [p for r in view.texts for p in r.pieces if p.kind == "learnt"]
    assert view.counts[0].layout == "masked"
    assert all(p.tokens == 1 for p in learnt)
    assert {p.text for p in learnt if p.truth} >= {"<unk>"}
    assert sum(row.pieces[0].kind == "learnt" for row in view.texts) < 2


def test_a_tokenizer_that_pads_with_its_end_token_ends_once():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token="</s>", pad_token="</s>")
    view = only(tp.recipe("seq2seq", varied(), tokenizer, batch_size=4, num_shards=1))
    for row in range(4):
        (text,) = marked(view, "target_ids", row)
        assert text.count("</s>") == 1
    assert view.counts[1].padding > 0
