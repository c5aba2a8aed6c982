"""A row in pieces: nothing of it is lost, whatever is learnt."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_fixtures import TEXTS, bpe
from trainpipes.look.preview.known_ids import KnownIds
from trainpipes.look.preview.legible import legible
from trainpipes.look.preview.pieces import row_of_tokens
from trainpipes.look.preview.token_grids import token_grids
from trainpipes.tokenizers.load import load

ENGINES = {"bytes": load("bytes"), "bpe": load(bpe())}


def grids_of(batch, engine=None):
    return token_grids(batch, KnownIds({"input_ids": engine}))


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
    pieces = row_of_tokens(grid, 0, most=10_000).pieces
    assert sum(piece.tokens for piece in pieces) == ids.shape[1]
    assert sum(piece.tokens for piece in pieces if piece.kind == "learnt") == grid.learnt_count
    whole = legible(engine.decode(ids[0].tolist()))
    # A character that is cut is whole in the piece where it ends, and told by its bytes before that.
    joined = "".join(piece.text for piece in pieces)
    if "\\x" not in joined and "\ufffd" not in joined:
        assert joined == whole


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    left=st.booleans(),
    data=st.data(),
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
    grids = grids_of(
        {"input_ids": ids, "labels": labels, "attention_mask": torch.tensor(mask)}, ENGINES["bytes"]
    )
    if not longest:
        assert grids == []
        return
    (grid,) = grids
    assert grid.padding == mask.size - mask.sum()
    for row, length in enumerate(lengths):
        pieces = row_of_tokens(grid, row).pieces
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
            found = row_of_tokens(grid, row)
            assert found.documents == max(1, len(documents))
            pieces = [p.tokens for p in found.pieces if p.kind == "plain"]
            assert pieces == documents


@given(st.text())
def test_text_of_the_data_is_printable(text):
    found = legible(text, 50)
    assert found.replace("\u200d", "").isprintable()
    assert "\n" not in found


@given(st.lists(st.one_of(st.integers(-(2**62), 2**62), st.integers(0, 300)), max_size=40))
def test_no_id_makes_decoding_fail(ids):
    for engine in ENGINES.values():
        assert isinstance(engine.decode(ids), str)
