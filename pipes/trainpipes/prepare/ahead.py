"""Where a pipeline is cut in two: stages that run once, ahead, and stages that run in every epoch.

Ahead run all stages up to the last that makes ids, and those after it that only cut, name or choose
columns. What drops rows after the ids stays with training: so blocks and order are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainpipes._internal.checks import require
from trainpipes.engine.planning.chain import MixingSource
from trainpipes.engine.planning.column_types import gives_objects
from trainpipes.engine.planning.plan import Plan
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.stage import Stage
from trainpipes.pipeline.chain import Pipeline
from trainpipes.sources.files.file_reader import FileBlocks
from trainpipes.stages.labels import EncodeLabels
from trainpipes.stages.tokenizing import TokenizedBy, Tokenizes, makers_of_columns
from trainpipes.writers.epoch_rows import WrittenColumns

CALLER, OPTION = "tokenize()", "tokenize(pipeline)"


@dataclass(frozen=True)
class Parts:
    """The stages of a pipeline that is prepared: done once, or in training."""

    ahead: tuple[Stage, ...]  # their rows are written
    training: tuple[Stage, ...]  # on these rows
    makers: tuple[TokenizedBy, ...]  # in training, for each stage that makes ids


def cut(pipeline: Pipeline) -> Parts:
    stages = pipeline.stages
    mixed, way = isinstance(stages[0], MixingSource), "prepare each of its sources, and mix these"
    require(not mixed, OPTION, "of the files of one source", stages[0], way)
    tokenizers = [n for n, s in enumerate(stages) if isinstance(s, Tokenizes)]
    held = any(isinstance(stages[n], TokenizedBy) for n in tokenizers)
    require(not held, OPTION, "of texts, and not of token ids", pipeline)
    rule, way = "one with tokenize() or chat_template()", "write other rows by write_parquet()"
    require(tokenizers, OPTION, rule, pipeline, way)
    last, first_lists = tokenizers[-1], isinstance(stages[0], kinds.ListingSource)
    ahead: list[Stage] = []
    training: list[Stage] = []
    closed = False  # whether all that is left is training's
    for number, stage in enumerate(stages):
        below, is_shuffled = number <= last, kinds.first_of(training, kinds.ShuffleStage)
        if isinstance(stage, kinds.CacheStage):
            continue  # the files are the cache
        if isinstance(stage, kinds.Source):
            is_ahead = True
        elif isinstance(stage, kinds.ShuffleStage | kinds.ShardStage):  # of files
            is_ahead = not any(isinstance(s, kinds.Source) for s in ahead[1:]) and first_lists
        elif below and isinstance(stage, kinds.RepeatStage | EncodeLabels):
            later = stages[number + 1 : last + 1]
            is_ahead = isinstance(stage, EncodeLabels) and any(
                later_stage._calls_function for later_stage in later
            )
        elif isinstance(stage, kinds.CountingStage) and not is_shuffled:
            is_ahead = not closed
        elif below:
            _check(stage, stages[last])
            is_ahead = True
        else:
            closed = closed or not kinds.keeps_each_row(stage) or stage._calls_function
            is_ahead = not closed
        (ahead if is_ahead else training).append(stage)
    return Parts(tuple(ahead), tuple(training), _makers(ahead))


def _check(stage: Stage, last: Stage) -> None:
    option, name = f"{CALLER}: a stage before {last.name}()", last.name
    rule, way = "one that treats each row by itself", "write its rows with write_parquet() first"
    require(kinds.is_on_rows(stage), option, rule, stage, way)
    rule, way = "one that gives the same in every epoch", f"put it after {name}()"
    require("epoch" not in stage.traits.depends_on, option, rule, stage, way)


def _makers(ahead: Sequence[Stage]) -> tuple[TokenizedBy, ...]:
    makers = makers_of_columns(ahead)
    groups: dict[str, list[str]] = {}
    for column, maker in makers.items():
        groups.setdefault(json.dumps(maker.maker.fingerprint()), []).append(column)
    return tuple(
        TokenizedBy(
            (options := makers[columns[0]].options)["tokenizer"],
            columns,
            # Rows without a target are dealt with ahead, unless they are only warned of.
            on_error=None if options["on_error"] is None else "keep",
            engine=options.get("engine", "auto"),
        )
        for columns in groups.values()
    )


def open_plan(
    ahead: Sequence[Stage], source: Any = None, schemas: Mapping[str, Any] | None = None
) -> Plan:
    stages = [stage._fresh() for stage in ahead]
    if gives_objects(stages):
        stages.append(WrittenColumns(CALLER))
    plan = Plan.of(stages, source, quiet=True)
    odd = next((s for s in plan.chain.steps if not isinstance(s, kinds.RunStage)), None)
    rule, way = "of stages that treat each row by itself", "put it directly after the source"
    require(odd is None, OPTION, rule, odd, way)
    rule, way = (
        "one that reads files of rows",
        "write other rows by write_parquet() after tokenize()",
    )
    source = plan.inputs.source
    blocks_of_files = isinstance(source, FileBlocks) and source.file_of_block is not None
    require(blocks_of_files, OPTION, rule, plan.chain.opener, way)
    plan.inputs.schemas.adopt(schemas or {})
    return plan
