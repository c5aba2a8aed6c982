"""mask_tokens: what it hides, how often, and that it always hides the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.tokenizers.engine import begins_word

MASK, SIZE = 990, 1000
KNOWN: dict[str, Any] = {"mask_token_id": MASK, "vocab_size": SIZE, "special_ids": [0, 1]}


def rows(count: int = 400, width: int = 50) -> tp.Pipeline:
    ids = np.random.default_rng(0).integers(0, 900, (count, width)).tolist()
    return tp.from_arrow(pa.table({"input_ids": ids, "row": range(count)}))


def pairs(pipe: tp.Pipeline) -> tuple[Any, Any]:
    found = list(pipe)
    return (np.concatenate([row[name] for row in found]) for name in ("input_ids", "labels"))  # type: ignore[return-value]


def close(share: float, expected: float, count: int) -> bool:
    return abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9


@pytest.mark.parametrize(("mask", "random"), [(0.8, 0.1), (1.0, 0.0), (0.0, 0.5), (0.0, 1.0)])
def test_shares_are_those_of_the_rule(mask: float, random: float) -> None:
    plain = np.concatenate([row["input_ids"] for row in rows()])
    shares = {"mask_replace_prob": mask, "random_replace_prob": random}
    ids, labels = pairs(rows().mask_tokens(0.15, **shares, **KNOWN))
    chosen = labels != -100
    special = plain <= 1
    assert not (chosen & special).any()
    assert (labels[chosen] == plain[chosen]).all()
    assert (ids[~chosen] == plain[~chosen]).all()
    count = int(chosen.sum())
    assert close(chosen[~special].mean(), 0.15, int((~special).sum()))
    masked, kept = ids[chosen] == MASK, ids[chosen] == plain[chosen]
    assert close(masked.mean(), mask + random / SIZE, count)
    assert close(kept.mean(), 1 - mask - random + random / SIZE, count)
    others = ids[chosen & (ids != MASK) & (ids != plain)]
    assert len(others) == 0 or (others.min() < 50 and others.max() > 950)


def test_places_are_chosen_alike_and_independently() -> None:
    _, labels = pairs(rows(2000, 20).mask_tokens(0.2, **{**KNOWN, "special_ids": []}))
    table = (labels != -100).reshape(2000, 20)
    assert all(close(share, 0.2, 2000) for share in table.mean(axis=0))
    both = (table[:, :-1] & table[:, 1:]).mean()
    assert close(both, 0.04, 19 * 2000)
    assert close((table[:-1] & table[1:]).mean(), 0.04, 20 * 2000)


def test_each_epoch_and_seed_hides_others_and_a_row_its_own(tmp_path: Path) -> None:
    def hidden(pipe: tp.Pipeline) -> dict[int, tuple[int, ...]]:
        return {row["row"]: tuple(row["labels"]) for row in pipe}

    pipe = rows().mask_tokens(**KNOWN)
    first, second = hidden(pipe), hidden(pipe)
    assert sum(first[n] == second[n] for n in first) < 5
    seeded = hidden(rows().mask_tokens(seed=1, **KNOWN))
    assert sum(first[n] == seeded[n] for n in first) < 5
    mixed = rows().sharding_filter(4).shuffle(50, seed=3).mask_tokens(**KNOWN)
    assert hidden(mixed) == first
    assert hidden(mixed) == second
    table = pa.Table.from_pylist(list(rows()))
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=33)
    assert hidden(tp.list_files(tmp_path).read_parquet().mask_tokens(**KNOWN)) == first


def test_values_are_those_that_earlier_versions_gave(golden: Any) -> None:
    words = tp.from_arrow(pa.table({"input_ids": [[2, 3, 4, 5, 4, 4, 3, 2] * 3]}))
    found = {
        "mask_tokens": list(rows(6, 12).mask_tokens(0.4, **KNOWN)),
        "seed 7, third epoch": list(rows(6, 12).mask_tokens(0.4, seed=7, **KNOWN).repeat(3))[12:],
        "whole words": list(words.mask_tokens(0.5, whole_words=True, tokenizer=wordpiece())),
    }
    golden("mask_tokens.json", found)


# Words


def wordpiece() -> Any:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, "[MASK]": 1, "play": 2, "##ing": 3, "##s": 4, ",": 5, "[SEP]": 6}
    found = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.add_special_tokens([AddedToken(name) for name in ("[UNK]", "[MASK]", "[SEP]")])
    return found


def test_the_mask_token_is_the_one_that_the_tokenizer_names(tmp_path: Path) -> None:
    tokenizer = wordpiece()
    tokenizer.add_special_tokens(["<hide>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": "<hide>"}')
    text = tp.from_arrow(pa.table({"text": ["play"] * 50}))
    for given, mask in ((tokenizer, 1), (tmp_path, 7)):
        hidden = text.tokenize(given).mask_tokens(1.0, mask_replace_prob=1.0, random_replace_prob=0)
        assert {*next(iter(hidden))["input_ids"]} == {mask}


def test_words_are_hidden_whole_or_not_at_all() -> None:
    texts = ["playings plays , playing play"] * 500
    text = tp.from_arrow(pa.table({"text": texts})).tokenize(wordpiece())
    ids = next(iter(text))["input_ids"]
    words = [0, 0, 0, 1, 1, 2, 3, 3, 4]
    assert ids == [2, 3, 4, 2, 4, 5, 2, 3, 2]
    counts = np.zeros(5)
    for row in text.mask_tokens(0.3, whole_words=True):
        chosen = np.array(row["labels"]) != -100
        for word in range(5):
            own = chosen[np.array(words) == word]
            assert own.all() or not own.any()
            counts[word] += own.all()
    assert all(close(count / 500, 0.3, 500) for count in counts)


def test_the_first_token_of_a_row_and_after_a_special_one_begins_a_word() -> None:
    ids = [[3, 4, 6, 3], [4]]
    table = tp.from_arrow(pa.table({"input_ids": ids * 300}))
    first = []
    for row in table.mask_tokens(0.5, whole_words=True, tokenizer=wordpiece()):
        chosen = [label != -100 for label in row["labels"]]
        if len(chosen) == 4:
            assert chosen[0] == chosen[1]
            assert not chosen[2]
            first.append(chosen[0] == chosen[3])
    assert 100 < sum(first) < 200


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["▁a", "b", "▁"], [True, False, True]),
        (["Ġa", "b", "Ċ", "ĠĠ"], [True, False, True, True]),
        (["a", "##b", "##"], [True, False, False]),
        (["a", "b"], None),
    ],
)
def test_words_begin_where_names_say(pieces: list[str], expected: Any) -> None:
    found = begins_word({name: number for number, name in enumerate(pieces)})
    assert (None if found is None else found.tolist()) == expected


# What is asked of the tokenizer


def test_the_tokenizer_below_says_what_is_special() -> None:
    texts = tp.from_arrow(pa.table({"text": ["play , plays"] * 50}))
    tokens = texts.tokenize(wordpiece(), add_eos="[SEP]")
    stage = tokens.mask_tokens(1.0, mask_replace_prob=1, random_replace_prob=0)
    assert next(iter(stage)) == {"input_ids": [1, 1, 1, 1, 6], "labels": [2, 5, 2, 4, -100]}
    told = json.loads(stage.state_dict()["pipeline"])["stages"][-1]  # type: ignore[index]
    assert (told["mask_token_id"], told["vocab_size"]) == (1, 7)


def test_padding_is_not_hidden() -> None:
    table = pa.table({"input_ids": [[5, 6, 7, 7]] * 3, "attention_mask": [[1, 1, 0, 0]] * 3})
    _, labels = pairs(tp.from_arrow(table).mask_tokens(1.0, **KNOWN))
    assert labels.tolist() == [5, 6, -100, -100] * 3
    named = tp.from_arrow(table.rename_columns(["ids", "attention_mask"]))
    for pipe in (named.mask_tokens(1.0, column="ids", **KNOWN), named.add_labels("ids")):
        assert [row["labels"] for row in pipe] == [[5, 6, -100, -100]] * 3
    both = tp.from_arrow(table.append_column("ids", pa.array([[5]] * 3)))  # it is not of these
    assert [row["labels"] for row in both.add_labels("ids")] == [[5]] * 3


@pytest.mark.parametrize("method", ["concat", "best_fit"])
@pytest.mark.parametrize("mixed", [False, True])
def test_labels_stay_where_rows_are_packed(method: Any, mixed: bool) -> None:
    masked = rows().mask_tokens(0.5, mask_replace_prob=1, random_replace_prob=0, **KNOWN)
    chain = tp.mix({"a": masked}).sharding_filter(1) if mixed else masked
    ids, labels = pairs(chain.pack(35, method=method))
    assert ((ids == MASK) == (labels != -100)).all()
    assert int((ids == MASK).sum()) == sum(row["input_ids"].count(MASK) for row in masked)


def test_packed_rows_are_hidden_without_their_labels() -> None:
    packed = rows().pack(100)
    with pytest.raises(tp.SchemaError, match=r"'labels' already; .*drop_columns\('labels'\)"):
        list(packed.mask_tokens(**KNOWN))
    ids, labels = pairs(packed.drop_columns("labels").mask_tokens(**KNOWN))
    assert (labels[ids == MASK] != -100).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"whole_words": True, **KNOWN}, "to tell whole_words"),
        ({"tokenizer": "bytes"}, "bytes has none of .*pass mask_token_id"),
        ({"tokenizer": "bytes", "mask_token_id": 3}, "vocabulary"),
        ({"tokenizer": "plain words", "whole_words": True}, "does not mark where words begin"),
    ],
)
def test_what_cannot_be_masked_is_refused(options: dict[str, Any], message: str) -> None:
    if options.get("tokenizer") == "plain words":
        options = {**options, "tokenizer": plain_words()}
    with pytest.raises(tp.ConfigError, match=message):
        list(rows().mask_tokens(**options))


def plain_words() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0, "<mask>": 1}, unk_token="a"))
