"""What a recipe is given: files of any format, or a pipeline of rows; and which columns it takes.

>>> import trainpipes as tp
>>> sums = tp.from_dataset([{"question": "1 + 1?", "answer": "2", "id": 7}])
>>> given = Input("mine", sums)
>>> question, answer = given.find({"prompt": None, "response": None}, PAIRS)
>>> list(given.rows([question, answer]))
[{'question': '1 + 1?', 'answer': '2'}]
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

import trainpipes as tp
from trainpipes._internal.checks import whole_number
from trainpipes._internal.locks import cached_property
from trainpipes.columns.arrays import first_null, is_text, viewless
from trainpipes.interfaces.quarantine import OnBadRow, OnError, leaves_out
from trainpipes.prepare import tokenized_rows
from trainpipes.sources.files.file_reader import one_reader

__all__ = [
    "CONVERSATIONS", "LABELS", "PAIRS", "PREFERENCES", "PROMPTS", "TEXTS", "TEXT_PAIRS", "TOKENS",
    "Input", "OnBadRow", "OnError", "balanced", "documented", "joined_pair", "whole_number",
    "with_context",
]  # fmt: skip

log = logging.getLogger("trainpipes")

#: Common names of columns, the first that are there are taken.
PAIRS = (
    ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"),
    ("instruction", "response"), ("question", "answer"), ("query", "response"), ("input", "output"),
    ("source", "target"), ("document", "summary"), ("article", "highlights"), ("article", "summary"),
    ("dialogue", "summary"), ("text", "summary"), ("question", "response"),
)  # fmt: skip
TOKENS = (("input_ids",), ("tokens",), ("token_ids",), ("ids",))
TEXTS = (("text",), ("content",), ("document",), ("body",))
CONVERSATIONS = (("messages",), ("conversations",), ("conversation",), ("dialog",), ("chat",))
PREFERENCES = (
    ("chosen", "rejected"), ("preferred", "dispreferred"), ("chosen_response", "rejected_response"),
)  # fmt: skip
#: Of what comes before a prompt or conversation, which no recipe takes from a column of its own.
BEFORE = ("system", "system_prompt", "system_message", "history")
#: Of a context beside an instruction: Alpaca's and Dolly's.
CONTEXTS = ("input", "context")
PROMPTS = (("prompt",), ("question",), ("instruction",), ("input",), ("query",))

TEXT_PAIRS = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"),
    ("question", "sentence"), ("text", "text_pair"), ("text1", "text2"),
)  # fmt: skip
LABELS = tuple((name,) for name in (
    "label", "labels", "class", "category", "target", "sentiment", "intent", "topic",
))  # fmt: skip

#: Treatment of a context that is null.
OnNull: TypeAlias = Literal["leave", "skip", "raise"]

#: Recipes by their columns, those of rarer columns first.
OTHERS = (
    ("preference", PREFERENCES, "a better and a worse response"),
    ("chat", CONVERSATIONS, "conversations"),
    ("sft", PAIRS, "prompts and responses"),
    ("tokens", TOKENS, "token ids"),
    ("pretrain", TEXTS, "text"),
)

#: Stages that make token ids.
TOKENIZING = ("tokenize", "chat_template", "tokenized_by")


#: What options mean in every recipe that has them and does not say it itself.
COMMON = {
    "files": "a path, folder, glob, URL, or a list of them, in any format; or a pipeline of rows.",
    "tokenizer": 'as in ``tokenize``: a name on the Hugging Face hub, a path, "bytes", an object.',
    "train": "False to evaluate: every row once; in file order, unless rows are left out or packed and "
    "``num_shards`` is not 1. Ranks may end a step apart.",
    "batch_size": "rows in a batch.",
    "balance": "to train, give batches of about the same cost to all ranks of a step: so many batches of a "
    "shard are sorted together, 64 for instance. See ``Pipeline.balance``.",
    "buffer_size": "the fewest rows that the shuffle mixes with each other.",
    "seed": "for the order of rows.",
    "num_shards": "a multiple of every number of ranks that the run may have.",
    "drop_last": "to train, leave out the short batch at the end of an epoch.",
    "packed": "let several rows share one of L = ``max_length`` tokens, in batches as in ``pretrain``, "
    "with the labels above. The number of batches is then not known, and each shard's last batch may be "
    "short.",
    "cache": "keep token ids on disk: True for the folder of ``tp.cache``, or a folder.",
    "storage_options": "of the file system, as fsspec takes them.",
    "on_error": 'for rows whose text is null: "skip" leaves them out and logs how many; else the first '
    "is an error.",
    "roles": 'other names of roles: ``{"narrator": "system"}``.',
}
#: The defaults of each recipe's options.
DEFAULTS: dict[str, dict[str, Any]] = {}
Recipe = TypeVar("Recipe", bound=Callable[..., tp.Pipeline])


def documented(recipe: Recipe) -> Recipe:
    """A recipe whose docstring also tells of the options in ``COMMON``."""
    head, _, rest = inspect.cleandoc(recipe.__doc__ or "").partition("Args:\n")
    entries, _, end = rest.partition("\n\n")
    texts = COMMON | dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", entries, re.MULTILINE))
    names = [name for name in inspect.signature(recipe).parameters if name in texts]
    lines = [f"    {name}: {texts[name]}" for name in names]
    recipe.__doc__ = "\n".join([f"{head}Args:", *lines, "", end])
    options = inspect.signature(recipe).parameters.values()
    DEFAULTS[recipe.__name__] = {option.name: option.default for option in options}
    return recipe


class Input:
    """What a recipe of yours is given: files, read as their names say, or a pipeline of rows.

    Args:
        recipe: who asks, for messages.
        data: a path, folder, glob, URL, or a list of them; or a ``Pipeline`` of rows, not batched.
        storage_options: of the file system, as fsspec takes them.
    """

    def __init__(
        self, recipe: str, data: Any, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self.recipe, self._data, self._storage_options = recipe, data, storage_options
        many = data if isinstance(data, list | tuple) else [data]
        if isinstance(data, tp.Pipeline):
            names = {stage.name for stage in data.stages}
            if names & {"batch", "bucket_by_length"}:
                way = "leave out its batch() and what follows"
                raise tp.ConfigError(
                    f"{recipe} takes a pipeline of rows, got one that batches: {way}"
                )
            if "list_files" in names and not any(name.startswith("read_") for name in names):
                way = "add its reader, such as .read_parquet()"
                raise tp.ConfigError(f"{recipe} takes a pipeline of rows, got one of paths: {way}")
        elif not many or not all(isinstance(path, str | os.PathLike) for path in many):
            rule = "files (a path, folder, glob, URL, or a list of them) or a pipeline of rows"
            way = (
                "trainpipes.from_hf, from_dataset and from_arrow make a pipeline of data in memory"
            )
            if data == [] or data == ():
                raise tp.MissingFilesError(f"{recipe} takes {rule}, got an empty list: name a file")
            raise tp.ConfigError(f"{recipe} takes {rule}, got {type(data).__name__}: {way}")

    # Rows

    @cached_property
    def columns(self) -> list[str]:
        return list(self.rows().explain(world_size=1).columns)

    def rows(self, columns: Sequence[str] | None = None, texts: Sequence[str] = ()) -> tp.Pipeline:
        wanted = None if columns is None else list(dict.fromkeys(columns))
        if isinstance(self._data, tp.Pipeline):
            rows = self._data
        elif self._reader == "from_memmap":
            rows = tp.from_memmap(self._data)
        else:
            listed = tp.list_files(self._data, storage_options=self._storage_options)
            read = getattr(listed, self._reader)
            if wanted is not None and texts and self._reader == "read_webdataset":
                return read(wanted, text=texts)  # type: ignore[no-any-return]
            if wanted is not None and self._reader not in ("read_text", "read_images"):
                return read(wanted)  # type: ignore[no-any-return]
            rows = read()
        return rows if wanted is None else rows.select(*wanted)

    def first(self, column: str) -> Any:
        """The first value in a column that is not null, or several as a list."""
        rows = islice(self.rows([column]).distributed(rank=0, world_size=1), 1000)
        value: Any = next((row[column] for row in rows if row[column] is not None), None)
        several = isinstance(value, tuple) or getattr(value, "ndim", 0) > 0
        return list(value) if several else value

    def tokenized(
        self,
        tokenizer: Any,
        columns: Sequence[str],
        *,
        named: Sequence[str | None] = (),
        shaping: Mapping[str, Any] | None = None,
        on_error: OnError | None = None,
        **made_by: Mapping[str, Any],
    ) -> tp.Pipeline | None:
        """The rows, if ``trainpipes tokenize`` made their token ids ahead; else None.

        Args:
            tokenizer: the recipe's.
            columns: that it needs.
            named: columns of texts that the user named; their ids are made anew.
            shaping: options that shape ids and that files do not tell; refused where given.
            on_error: treatment of rows without a target.
            made_by: the options that each stage that made ids must have had; ``...`` for any but
                None.
        """
        ids = {name for name in columns if name.endswith("input_ids")}
        if isinstance(self._data, tp.Pipeline) or self._reader != "read_parquet":
            return None
        if not ids & set(self.columns):  # so that files of texts are not listed twice
            return None
        if any(named):
            lacking = [name for name in named if name and name not in self.columns]
            if lacking:
                raise tp.SchemaError(
                    f"{self.recipe}: the files hold token ids, which were made ahead, and no column "
                    f"{lacking[0]!r}: leave out the option that names it, which has shaped the ids already, "
                    "or give the files of texts",
                    stage=self.recipe,
                )
            return None
        rows = tokenized_rows(
            self.rows(), tokenizer, columns, caller=self.recipe, made_by=made_by, on_error=on_error
        )
        for option, value in (shaping or {}).items():
            if rows is not None and value is not None:
                rule = "must be left out with token ids that were made ahead, which it has shaped already"
                way = "leave it out, or give the files of texts"
                raise tp.ConfigError(f"{self.recipe}({option}) {rule}, got {value!r}; {way}")
        return rows

    @cached_property
    def _reader(self) -> str:
        urls = self._data if isinstance(self._data, list | tuple) else [self._data]
        return one_reader(list(map(os.fspath, urls)), self._storage_options, self.recipe)

    @property
    def is_text(self) -> bool:
        """Whether it is files of text alone, without columns."""
        return not isinstance(self._data, tp.Pipeline) and self._reader == "read_text"

    # Columns

    def find(
        self, options: Mapping[str, str | None], known: Sequence[Sequence[str]]
    ) -> tuple[str, ...]:
        """Which columns to take: those given, or the first of ``known`` that are all there, logged
        at level INFO.
        """
        asked = tuple(options.values())
        for option, name in options.items():
            if name is not None and not (isinstance(name, str) and name):
                way = "leave it out to have it found by common names"
                rule = f"must be the name of a column, got {name!r}"
                raise tp.ConfigError(f"{self.recipe}({option}) {rule}; {way}")
        if None not in asked:
            return tuple(str(name) for name in asked)
        for names in sorted(known, key=lambda names: not {*asked} & {*names}):  # theirs first
            taken = {option: names[n] for n, option in enumerate(options) if asked[n] is None}
            if set(taken.values()) <= set(self.columns):
                choices = [f"{option} from column {name!r}" for option, name in taken.items()]
                log.info("%s takes %s", self.recipe, ", ".join(choices))
                return tuple(
                    taken.get(option) or str(option_name) for option, option_name in options.items()
                )
        raise self._not_found(options, known)

    def _not_found(
        self, options: Mapping[str, Any], known: Sequence[Sequence[str]]
    ) -> tp.TrainpipesError:
        if not self.columns and not isinstance(self._data, tp.Pipeline):
            way = "name files that have rows, or leave empty ones out"
            return tp.DataError(f"{self.recipe}: {self._data!r} has no rows and no columns; {way}")
        open_ones = [name for name, value in options.items() if value is None]
        lines = ", ".join(f"{name}=..." for name in open_ones)
        subject = "token ids" if open_ones[0] == "column" else open_ones[0].replace("_", " ")
        tried = ", ".join(" + ".join(names) for names in known)
        other = next((
            f"use the recipe {recipe}, which takes {takes} ({' + '.join(names)}), or "
            for recipe, several, takes in OTHERS
            for names in several
            if recipe != self.recipe and set(names) <= set(self.columns)
        ), "")  # fmt: skip
        said = f"no column found for the {subject}; the columns are {self.columns}, and names tried were"
        way = f"{other}name one by {lines}{self._of_csv()}"
        return tp.SchemaError(f"{self.recipe}: {said} {tried}: {way}", stage=self.recipe)

    def _of_csv(self) -> str:
        """What to do where the names of columns are those of no header."""
        if isinstance(self._data, tp.Pipeline) or self._reader != "read_csv":
            return ""
        if mark := next((c for c in "|\t;" if any(c in name for name in self.columns)), ""):
            return f"; or, if {mark!r} parts the cells, give trainpipes.read_csv(files, delimiter={mark!r})"
        if any(name.replace(".", "", 1).isdecimal() for name in self.columns):
            way = "give trainpipes.read_csv(files, column_names=[...])"
            return f"; or, if the first line is a row, and no header, {way}"
        return ""

    def texts(self, text: str | None, text_pair: str | None, label: str) -> list[str]:
        """The column of a text, or two of a pair; see ``find``."""
        pairs = any(set(names) <= set(self.columns) for names in TEXT_PAIRS)
        if text is None and (pairs or text_pair is not None):
            texts = [*self.find({"text": text, "text_pair": text_pair}, TEXT_PAIRS)]
        else:
            texts = [*self.find({"text": text}, (*TEXTS, ("sentence",), ("review",)))]
            texts += [] if text_pair is None else [text_pair]
        if label in texts:
            rule = "takes texts and labels from columns of their own"
            raise tp.ConfigError(f"{self.recipe} {rule}, got {label!r} for both")
        return texts

    # Stages

    def context(self, prompt: str, context: str | None) -> str | None:
        """The column that a prompt goes on with: the given one, or one beside an instruction; none for ""."""
        if context is None and prompt == "instruction":
            return next((name for name in CONTEXTS if name in self.columns), None)
        return context or None

    def warn_of_unused(self, *used: str | None) -> None:
        """Log a column that models are usually shown before a prompt, and one that says which rows are bad
        (as for KTO), if the recipe leaves it out. Where the user names all columns of a pipeline, nothing
        of it is read for this.
        """
        if "columns" not in vars(self):
            return
        ways = dict.fromkeys(
            (*BEFORE, "tools"),
            "to show it to the model, join it to the prompt or the messages by map()",
        )
        ways["label"] = "to leave out rows of False, put filter() before"
        if "context" in DEFAULTS.get(self.recipe, {}) and "" not in used:
            way = 'to add it to the prompt, give context={!r}; or context=""'
            ways |= {name: way.format(name) for name in CONTEXTS}
        for name, way in ways.items():
            value = self.first(name) if name in self.columns and name not in used else None
            if isinstance(value, bool) if name == "label" else value:
                log.warning("%s: column %r is not used: %s", self.recipe, name, way)

    def warn_of_joint(self, prompt: str, response: str) -> None:
        """Log that nothing parts the last word of a prompt from the first of a response, by the first row;
        read only as in ``warn_of_unused``.
        """
        if "columns" not in vars(self):
            return
        rows = self.rows([prompt, response]).distributed(rank=0, world_size=1)
        row: dict[str, Any] = next(iter(rows), {})
        before, after = row.get(prompt), row.get(response)
        if not (isinstance(before, str) and isinstance(after, str) and before and after):
            return
        if (before[-1].isalnum() or before[-1] in ".,:;!?") and after[0].isalnum():
            said = f"{before[-20:]!r} and {after[:20]!r} become one text, without a space between"
            way = 'put one, or "\\n", before each response by map()'
            log.warning("%s: %s: %s", self.recipe, said, way)

    def warn_of_own_classes(self) -> None:
        """Log that data to evaluate on may number its classes otherwise than the training did."""
        said = "%s: classes are numbered in the order of the names that are here; %s"
        log.warning(said, self.recipe, "where the training had others, pass its classes=[...]")

    def prompted(self, prompt: str, context: str | None, columns: Sequence[str]) -> tp.Pipeline:
        """``rows(columns)``, whose prompt goes on with its context, if there is a context."""
        added = self.context(prompt, context)
        self.warn_of_unused(*columns, context, added)
        if (context := added) is None:
            return self.rows(columns)
        return with_context(self.rows([*columns, context]), prompt, context)

    def arrange(
        self,
        rows: tp.Pipeline,
        train: bool,
        buffer_size: int,
        seed: int,
        num_shards: int,
        cache: bool | str = False,
    ) -> tp.Pipeline:
        """Rows in the order of training or evaluation, dealt to ranks and workers.

        To train they are shuffled, unless they are already. Stages that make token ids come after
        the shuffle unless there is a cache: else the first batch would wait for all rows of its
        buffer. Those before a take() or skip() stay, which counts rows in file order.
        """
        if cache:
            rows = rows.cache(None if cache is True else cache)
        stages, names = rows.stages, {stage.name for stage in rows.stages}
        counted = max((n for n, s in enumerate(stages) if s.name in ("take", "skip")), default=0)
        later = [
            n
            for n, s in enumerate(stages)
            if n > counted and s.name in TOKENIZING and not s.traits.keeps_rows
        ]
        first = later[0] if later and "cache" not in names else len(stages)
        if first < len(stages):
            rows = tp.Pipeline(stages[:first], rows._ranks, rows._members)
        if not train:
            for stage in stages:
                if stage.name in ("shuffle", "sharding_filter", "repeat", "mix"):
                    rule = "(train=False) gives every row once, in file order, and deals them to ranks itself"
                    way = "leave it out, or evaluate the sources of a mix one by one"
                    raise tp.ConfigError(f"{self.recipe}{rule}; got rows of {stage.name}(): {way}")
            rows = rows.sharding_filter(num_shards, split="stride", tail="uneven")
        else:
            if "sharding_filter" not in names:
                rows = rows.sharding_filter(num_shards)
            else:
                self._warn_of_no_effect("sharding_filter", num_shards=num_shards)
            if not names & {"shuffle", "mix"}:
                rows = rows.shuffle(buffer_size, seed=seed)
            else:
                mixing = "shuffle" if "shuffle" in names else "mix"
                self._warn_of_no_effect(mixing, buffer_size=buffer_size, seed=seed)
        for stage in stages[first:]:
            rows = rows.then(stage)
        return rows

    def _warn_of_no_effect(self, stage: str, **options: Any) -> None:
        """Log options of the order that the user gave with a pipeline that has an order of its own."""
        defaults = DEFAULTS.get(self.recipe, options)
        for option, value in options.items():
            if value != defaults.get(option, value):
                log.warning(
                    "%s(%s=%r) has no effect on the order: the pipeline given has %s() already; "
                    "set it there, or leave the stage out",
                    *(self.recipe, option, value, stage),
                )

    def batches(
        self, rows: tp.Pipeline, batch_size: int, *, drop_last: bool, packed: int | None, seed: int,
        balance: int | None = None, train: bool = True,
    ) -> tp.Pipeline:  # fmt: skip
        """Padded batches of rows of token ids, or of rows packed to so many tokens."""
        if packed is None:
            batches = rows.batch(batch_size, drop_last=drop_last)
            return balanced(batches, balance, train).pad_collate(padding_side="right")
        # Each shard packs its own, and keeps the rest; all rows were looked at.
        batches = rows.pack(packed, seed=seed, on_error="keep").batch(batch_size)
        return balanced(batches, balance, train).pad_collate()


def balanced(
    batches: tp.Pipeline, window: int | None, train: bool = True, **options: Any
) -> tp.Pipeline:
    """Batches in an order in which those of a step cost about the same, to train, if a window is given."""
    even = batches if window is None else batches.balance(window, **options)  # checks the window
    return even if train else batches


def with_context(rows: tp.Pipeline, prompt: str, context: str) -> tp.Pipeline:
    """Rows with the text of another column added to the prompt, after an empty line.

    >>> rows = tp.from_dataset([{"ask": "Add:", "of": "1 + 1"}, {"ask": "Sing!", "of": ""}])
    >>> list(with_context(rows, "ask", "of"))
    [{'ask': 'Add:\\n\\n1 + 1'}, {'ask': 'Sing!'}]
    """
    return joined(rows, prompt, context)


def joined(rows: tp.Pipeline, prompt: str, context: str, on_null: OnNull = "leave") -> tp.Pipeline:
    """``with_context``; where a context is null, the prompt stays as it is, or is made null, too ("skip"), or
    the row is refused.
    """
    join = _Joined(prompt, context, on_null)
    return rows.with_columns(join, format="arrow", thread_safe=True).drop_columns(context)


def joined_pair(
    rows: tp.Pipeline, text: str, text_pair: str, on_error: OnError | None
) -> tp.Pipeline:
    """``joined`` for a pair to tokenize: a second text that is null is refused, or its row left out."""
    return joined(rows, text, text_pair, "skip" if leaves_out(on_error) else "raise")


@dataclass(frozen=True)
class _Joined:
    prompt: str
    context: str
    on_null: OnNull = field(default="leave", repr=False)  # states know it by its text

    def __call__(self, table: pa.Table) -> dict[str, Any]:
        for name in (self.prompt, self.context):
            kind = table[name].type
            if not (is_text(kind) or types.is_null(kind) or types.is_dictionary(kind)):
                rule = "prompt and context are text: make it text with map(), or leave it out"
                raise tp.SchemaError(f"column {name!r} holds {kind}, and {rule}")
        names = self.prompt, self.context
        texts, more = (viewless(table[name]).cast(pa.string()) for name in names)
        if self.on_null == "raise" and more.null_count:
            way = 'drop such rows with filter(), or by on_error="skip"'
            said = f"column {self.context!r} is null, and there is no text to tokenize; {way}"
            raise tp.DataError(said, row=first_null(more))
        both = pc.binary_join_element_wise(texts, pc.fill_null(more, ""), "\n\n")
        texts = pc.if_else(pc.equal(pc.fill_null(more, ""), ""), texts, both)
        if self.on_null == "skip":
            texts = pc.if_else(more.is_valid(), texts, pa.scalar(None, pa.string()))
        return {self.prompt: texts}
