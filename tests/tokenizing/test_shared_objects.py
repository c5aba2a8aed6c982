"""Objects that a program gives to a pipeline and goes on using, in a thread of its own or between batches.

What our threads use, and what they share with the program:

- tokenizers of ``tokenizers``, fast and slow ones of transformers, SentencePiece processors: copies, as the
  object is when the stage is made; tiktoken's encodings themselves, which never change
- chat templates: a copy of the tokenizer, and a compiled template of our own
- processors of transformers: a copy for each thread
- ``datasets.Dataset``: its Arrow table, which never changes; ``IterableDataset``: a copy for each epoch
- images: opened, decoded and closed by the thread that needs their pixels
- file systems of fsspec: shared with the whole process, as fsspec means them to be; files are opened and
  closed by us
- functions, and datasets of from_dataset: the program's own, called by one thread at a time
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from every_stage import chat_tokenizer
from tokenizer_fixtures import bpe

ROWS = tp.from_arrow(
    pa.table(
        {
            "text": [f"hello there, number {n}" for n in range(40)],
            "messages": [
                [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "hello"}]
                for n in range(40)
            ],
        }
    )
)


def slow(path: Path) -> Any:
    return pytest.importorskip("transformers").ByT5Tokenizer()


def more_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens(["hello"])


def another_template(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    tokenizer.backend_tokenizer.enable_truncation(3)
    more_tokens(tokenizer)


Make = Callable[[Any], tp.Pipeline]
KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Any], None], Make]] = {
    "tokenizers": (lambda _: bpe(), more_tokens, lambda t: ROWS.tokenize(t)),
    "fast": (
        lambda _: copy.deepcopy(chat_tokenizer()), more_tokens, lambda t: ROWS.tokenize(t),
    ),
    "slow": (slow, more_tokens, lambda t: ROWS.tokenize(t)),
    "chat": (
        lambda _: copy.deepcopy(chat_tokenizer()), another_template, lambda t: ROWS.chat_template(t),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_program_does_to_its_tokenizer_does_not_change_the_pipelines(
    kind: str, tmp_path: Path
) -> None:
    make_tokenizer, change, chain = KINDS[kind]
    tokenizer = make_tokenizer(tmp_path)
    pipe = chain(tokenizer).batch(4)
    expected = list(pipe)
    begun = iter(pipe)
    batches = [next(begun)]
    change(tokenizer)
    assert [*batches, *begun] == expected
    assert list(chain(tokenizer).batch(4)) != expected, "the change is one that shows"
    derived = tp.Pipeline(pipe.stages)
    for later in (pipe, derived, pickle.loads(pickle.dumps(pipe))):
        assert list(later) == expected
    unused = chain(untouched := make_tokenizer(tmp_path)).batch(4)
    change(untouched)
    assert list(unused) == expected
    assert list(tp.Loader(pipe, num_workers=1)) == expected


def test_nor_does_what_it_does_to_its_processor() -> None:
    pytest.importorskip("transformers", "5.18")
    from trainpipes_recipes.vision import Processor
    from visions import processor_of

    given = copy.deepcopy(processor_of("llava"))
    processor = Processor(given)
    given.tokenizer.add_tokens(["hello"])
    given.image_processor.size = {"shortest_edge": 5}
    for kept in (processor, pickle.loads(pickle.dumps(processor))):
        assert kept.fingerprint() == Processor(processor_of("llava")).fingerprint()
