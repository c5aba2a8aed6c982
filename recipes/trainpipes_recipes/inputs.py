"""What a recipe is given: files of any format, or a pipeline of rows; and which columns it takes of it.

``Input`` is public, for recipes of your own:

>>> import trainpipes as tp
>>> sums = tp.from_dataset([{"question": "1 + 1?", "answer": "2", "id": 7}])
>>> given = Input("mine", sums)
>>> question, answer = given.find({"prompt": None, "response": None}, PAIRS)
>>> list(given.rows([question, answer]))
[{'question': '1 + 1?', 'answer': '2'}]
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import trainpipes as tp
from trainpipes.prepare import tokenized_rows
from trainpipes.sources.files.formats import ends_of_names, reader_by_name
from trainpipes.sources.mixed.mix import Mix
from trainpipes.stages.targets import OnError
from trainpipes.stages.tokenizing import Tokenizes

__all__ = [
    "CONVERSATIONS", "LABELS", "PAIRS", "PREFERENCES", "PROMPTS", "TEXTS", "TEXT_PAIRS", "TOKENS",
    "Input", "in_file_order", "shuffled", "with_context",
]  # fmt: skip

log = logging.getLogger("trainpipes")

#: Common names of columns, the first that are there are taken.
PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
    ("source", "target"),
)
TOKENS = (("input_ids",), ("tokens",), ("token_ids",), ("ids",))
TEXTS = (("text",), ("content",), ("document",), ("body",))
CONVERSATIONS = (("messages",), ("conversations",), ("conversation",), ("dialog",), ("chat",))
PREFERENCES = (
    ("chosen", "rejected"),
    ("preferred", "dispreferred"),
    ("chosen_response", "rejected_response"),
)
PROMPTS = (("prompt",), ("question",), ("instruction",), ("input",), ("query",))

TEXT_PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
    ("text1", "text2"),
)
LABELS = tuple((name,) for name in (
    "label", "labels", "class", "category", "target", "sentiment", "intent", "topic",
))  # fmt: skip

#: Recipes by what they take, those of rarer columns first.
OTHERS = (
    ("preference", PREFERENCES, "a better and a worse response"),
    ("chat", CONVERSATIONS, "conversations"),
    ("sft", PAIRS, "prompts and responses"),
    ("tokens", TOKENS, "token ids"),
    ("pretrain", TEXTS, "text"),
)

#: Those that have no choice of columns.
WHOLE = ("read_text", "read_images")


class Input:
    """Files of any format, or a pipeline of rows.

    Files are read as their names say: Parquet (``.parquet``, ``.pq``), JSON lines (``.jsonl``, ``.ndjson``,
    ``.json``), CSV (``.csv``, ``.tsv``), Arrow (``.arrow``, ``.feather``, ``.ipc``, and folders that
    ``save_to_disk`` of Hugging Face's datasets wrote), text (``.txt``: a row each line), tar archives, NumPy,
    pictures (in a folder for each class), and folders that ``write_memmap`` wrote. Nothing is read before
    columns are asked for, and then no more than the first row, or what a file's footer says.

    Args:
        recipe: who asks, for messages.
        data: a path, folder, glob, URL, or a list of them; or a ``Pipeline`` of rows that are not batched.
        storage_options: options of the file system, as fsspec takes them.

    Raises:
        ConfigError: it is neither, the pipeline batches, or files' names do not say how to read them.
    """

    def __init__(
        self, recipe: str, data: Any, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self.recipe = recipe
        self._data = data
        self._storage_options = storage_options
        if isinstance(data, tp.Pipeline):
            if any(stage.role == "batch" for stage in data.stages):
                raise tp.ConfigError(
                    f"{recipe} takes a pipeline of rows and batches them itself, got one that batches: "
                    "leave out its batch() and what follows"
                )
        elif not _is_path(data) and not (
            isinstance(data, Sequence) and data and all(map(_is_path, data))
        ):
            raise tp.ConfigError(
                f"{recipe} takes files (a path, folder, glob, URL, or a list of them) or a pipeline of "
                f"rows, got {type(data).__name__}: trainpipes.from_hf, from_dataset, from_arrow and others "
                "make a pipeline of data in memory"
            )

    @cached_property
    def columns(self) -> list[str]:
        """Names of the columns that are there."""
        return list(self._all_rows().explain(world_size=1).columns)

    def first(self, column: str) -> Any:
        """The first value in a column that is not null, for recipes that treat texts otherwise than lists.
        None if there is none in the first 1,000 rows."""
        rows = self.rows([column]).distributed(rank=0, world_size=1)
        values = (row[column] for row in islice(rows, 1000))
        return next((value for value in values if value is not None), None)

    def rows(self, columns: Sequence[str] | None = None) -> tp.Pipeline:
        """The rows, with these columns only, or all.

        Args:
            columns: their names. Of files that can be read by column, no others are read.
        """
        if columns is None:
            return self._all_rows()
        wanted = list(dict.fromkeys(columns))
        if isinstance(self._data, tp.Pipeline):
            return self._data.select(*wanted)
        if self._is_memmap or self._reader in WHOLE:
            return self._all_rows().select(*wanted)
        return self._read(wanted)

    def tokenized(
        self,
        tokenizer: Any,
        columns: Sequence[str],
        *,
        named: Sequence[str | None] = (),
        on_error: OnError | None = None,
        **made_by: Mapping[str, Any],
    ) -> tp.Pipeline | None:
        """The rows, where files hold token ids that ``trainpipes tokenize`` made ahead; None otherwise.

        Args:
            tokenizer: that the recipe is given.
            columns: that it needs.
            named: columns of texts that the user named: if one is, ids are made of it.
            on_error: what becomes of rows without a target.
            made_by: of each stage that may have made the ids, the options that it must have had.

        Raises:
            ConfigError: another tokenizer made them, or another option; or they are not finished.
            SchemaError: they lack a column.
        """
        if isinstance(self._data, tp.Pipeline) or self._is_memmap or any(named):
            return None
        if self._reader != "read_parquet":
            return None
        ids = [name for name in columns if name.endswith("input_ids")]
        if not set(ids) & set(self.columns):  # so that files of texts are not listed twice
            return None
        return tokenized_rows(
            self.rows(), tokenizer, columns, asker=self.recipe, made_by=made_by, on_error=on_error
        )

    def find(
        self, options: Mapping[str, str | None], known: Sequence[Sequence[str]]
    ) -> tuple[str, ...]:
        """Which columns to take. Where one is not given, the first of ``known`` that are all there; what
        is chosen is logged by "trainpipes", at level INFO.

        Args:
            options: what the user gave for each, None for nothing, in the order of ``known``'s.
            known: names that are common for them, the more common ones first.

        Raises:
            SchemaError: none of them are there; says which are.
        """
        given = list(options.values())
        odd = [o for o, name in options.items() if name is not None and not _is_name(name)]
        if odd:
            raise tp.ConfigError(
                f"{self.recipe}({odd[0]}) is the name of a column, got {options[odd[0]]!r}; leave it out to "
                "have it found by common names"
            )
        if None not in given:
            return tuple(name for name in given if name is not None)
        for names in known:
            fits = all(own in (None, name) for own, name in zip(given, names, strict=True))
            if fits and set(names) <= set(self.columns):
                break
        else:
            names = self._one_by_one(options, known)
        said = ", ".join(
            f"{option} from column {name!r}"
            for (option, own), name in zip(options.items(), names, strict=True)
            if own is None
        )
        log.info("%s takes %s", self.recipe, said)
        return tuple(names)

    def context(self, prompt: str, context: str | None) -> str | None:
        """The column that a prompt goes on with: what the user gave, "" for none. Left out, "input" beside
        "instruction", as Alpaca's rows have it."""
        if context is None and prompt == "instruction" and "input" in self.columns:
            return "input"
        return context or None

    def prompted(self, prompt: str, context: str | None, columns: Sequence[str]) -> tp.Pipeline:
        """``rows(columns)``, whose prompt goes on with its context, if there is one."""
        context = self.context(prompt, context)
        if context is None:
            return self.rows(columns)
        return with_context(self.rows([*columns, context]), prompt, context)

    def _one_by_one(
        self, options: Mapping[str, str | None], known: Sequence[Sequence[str]]
    ) -> list[str]:
        """Columns of which some are given by names that are not common."""
        found: list[str] = []
        for place, (option, own) in enumerate(options.items()):
            common = [names[place] for names in known]
            usual = own or next((name for name in common if name in self.columns), None)
            # Half of a pair says little: it is taken only where the user has named the other half.
            if usual is None or (own is None and set(options.values()) == {None}):
                tried = ", ".join(" + ".join(names) for names in known)
                lines = ", ".join(f"{name}=..." for name, value in options.items() if value is None)
                what = "token ids" if option == "column" else option.replace("_", " ")
                raise tp.SchemaError(
                    f"{self.recipe}: no column found for the {what}; the "
                    f"columns are {self.columns}, and names tried were {tried}: {self._other_recipe()}name "
                    f"one by {lines}",
                    stage=self.recipe,
                )
            found.append(usual)
        return found

    def _other_recipe(self) -> str:
        """The recipe that takes such columns, if it is another one."""
        for recipe, known, what in OTHERS:
            names = next((names for names in known if set(names) <= set(self.columns)), None)
            if names is not None and recipe != self.recipe:
                there = " + ".join(names)
                return f"use the recipe {recipe}, which takes {what} ({there}), or "
        return ""

    # Reading

    def _all_rows(self) -> tp.Pipeline:
        if isinstance(self._data, tp.Pipeline):
            return self._data
        if self._is_memmap:
            return tp.from_memmap(self._data)
        return self._read(None)

    def _read(self, columns: Sequence[str] | None) -> tp.Pipeline:
        files = tp.list_files(self._data, storage_options=self._storage_options)
        read = getattr(files, self._reader)
        rows: tp.Pipeline = read() if columns is None else read(columns)
        return rows

    @cached_property
    def _is_memmap(self) -> bool:
        return _is_path(self._data) and (Path(self._data) / "manifest.json").is_file()

    @cached_property
    def _reader(self) -> str:
        """The method that reads the files."""
        given = [self._data] if _is_path(self._data) else self._data
        named = [reader_by_name(os.fspath(path)) for path in given]
        if "" in named:  # folders, or globs without an end
            ends = ends_of_names()
            listed = tp.list_files(self._data, suffix=ends, storage_options=self._storage_options)
            named = [reader_by_name(path) for path in listed.distributed(rank=0, world_size=1)]
        found = sorted(set(named))
        if found == [""] or len(found) != 1:
            kinds = ", ".join(reader or "others" for reader in found)
            raise tp.ConfigError(
                f"{self.recipe}: how to read {self._data!r} cannot be told from the names of the "
                f"files ({kinds}): read them with one of trainpipes' readers, and pass the "
                "pipeline, as in "
                f"{self.recipe}(trainpipes.{_most_common(named)}(...), ...)"
            )
        return found[0]


def shuffled(rows: tp.Pipeline, buffer_size: int, *, seed: int, num_shards: int) -> tp.Pipeline:
    """Rows in another order every epoch, dealt to ranks and workers:
    ``rows.sharding_filter(num_shards).shuffle(buffer_size, seed=seed)``, but for what the rows are given
    with. Rows that are shuffled or sampled already keep their order, and so do those of a mix, whose
    sources are shuffled each by itself. Stages that make token ids and leave out rows come after it, unless
    a cache keeps what they make: before it, all rows of a shuffle's buffer would be tokenized for the first
    batch.

    >>> shuffled(tp.from_dataset([1, 2, 3]), 2, seed=0, num_shards=1).stages[1:]
    (sharding_filter(1), shuffle(2))
    """
    roles = {stage.role for stage in rows.stages}
    dropping = [isinstance(s, Tokenizes) and not s.keeps_rows for s in rows.stages]
    later: Sequence[Any] = ()
    if any(dropping) and "cache" not in roles:
        first = dropping.index(True)
        later = rows.stages[first:]
        rows = tp.Pipeline(rows.stages[:first], rows._ranks, rows._members)
    if "shard" not in roles:
        rows = rows.sharding_filter(num_shards)
    if not roles & {"shuffle", "draw"} and not isinstance(rows.stages[0], Mix):
        rows = rows.shuffle(buffer_size, seed=seed)
    for stage in later:
        rows = rows.then(stage)
    return rows


def in_file_order(rows: tp.Pipeline) -> list[tp.Pipeline]:
    """The rows of each source once, as one rank reads them, whatever order, shards or weights of a mix they
    are given with: to count or to fit something over all of them.

    >>> rows = tp.from_dataset([{"x": 1}, {"x": 2}]).shuffle(2).repeat()
    >>> [list(part) for part in in_file_order(rows)]
    [[{'x': 1}, {'x': 2}]]
    """
    first, *above = (s for s in rows.stages if s.role not in ("shuffle", "shard", "repeat"))
    if isinstance(first, Mix):
        parts = (tp.Pipeline([*part.stages, *above]) for part in first.sources.values())
        return [found for part in parts for found in in_file_order(part)]
    return [tp.Pipeline([first, *above]).distributed(rank=0, world_size=1)]


def with_context(
    rows: tp.Pipeline, prompt: str, context: str, *, keep: bool = False
) -> tp.Pipeline:
    """Rows whose prompt goes on with another column, after an empty line, where that holds text; the column
    is left out then, unless it is to be kept.

    >>> rows = tp.from_dataset([{"ask": "Add:", "of": "1 + 1"}, {"ask": "Sing!", "of": ""}])
    >>> list(with_context(rows, "ask", "of"))
    [{'ask': 'Add:\\n\\n1 + 1'}, {'ask': 'Sing!'}]
    """
    joined = rows.with_columns(_Joined(prompt, context), format="arrow")
    return joined if keep else joined.drop_columns(context)


@dataclass(frozen=True)
class _Joined:
    prompt: str
    context: str

    def __call__(self, table: pa.Table) -> dict[str, Any]:
        texts, more = _text(table, self.prompt), _text(table, self.context).fill_null("")
        both = pc.binary_join_element_wise(texts, more, "\n\n")
        return {self.prompt: pc.if_else(pc.equal(pc.binary_length(more), 0), texts, both)}


def _text(table: pa.Table, name: str) -> Any:
    """A column of text; one of nothing but nulls is text, too."""
    kind = table[name].type
    if pa.types.is_null(kind) or pa.types.is_dictionary(kind) or pa.types.is_string_view(kind):
        return table[name].cast(pa.string())
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise tp.SchemaError(
            f"column {name!r} holds {kind}, and prompt and context are text: make it text with map()"
        )
    return table[name]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _most_common(readers: Sequence[str]) -> str:
    """The reader of most files, where the names of any say one."""
    return Counter(filter(None, readers)).most_common(1)[0][0] if any(readers) else "read_json"
