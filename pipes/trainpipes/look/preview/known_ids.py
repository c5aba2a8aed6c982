"""Which columns of a pipeline's items hold token ids, and the tokenizer of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.kinds.stage import Stage
from trainpipes.stages.columns import Rename
from trainpipes.stages.encode_labels import EncodeLabels
from trainpipes.stages.mask_tokens import MaskTokens
from trainpipes.stages.pack import Pack
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.tokenizing import Tokenizes
from trainpipes.tokenizers.engine import Engine

__all__ = ["KnownIds", "known_ids"]


@dataclass
class KnownIds:
    """What the stages of a pipeline say of the columns that come out.

    Attributes:
        engines: the tokenizer of each column of ids; None where several say otherwise.
        own: columns that are texts of their own, made of other columns than "input_ids" is: an
            encoder-decoder's targets.
        masked: whether tokens are hidden, and labels are what they were.
        classes: names of classes by column, in their order.
    """

    engines: dict[str, Engine | None] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    masked: bool = False
    classes: dict[str, Mapping[int, str]] = field(default_factory=dict)

    def engine(self, name: str) -> Engine | None:
        """The tokenizer of a column; of one of another name, as a function may give it, the only one that
        there is."""
        if name in self.engines:
            return self.engines[name]
        told = {id(engine): engine for engine in self.engines.values()}
        return next(iter(told.values())) if len(told) == 1 else None


def known_ids(plan: Plan | None) -> KnownIds:
    """What the stages of a plan say; nothing of none."""
    found = KnownIds()
    if plan is not None:
        for stage in _stages(plan.inputs):
            _add(found, stage)
    return found


def _stages(inputs: Inputs) -> Iterator[Stage]:
    """Stages in the order in which rows go through them, those of sources that are joined first."""
    for part in [*inputs.mixed.values(), *getattr(inputs.source, "joined_inputs", ())]:
        yield from _stages(part)
    yield from inputs.chain.stages


def _add(found: KnownIds, stage: Stage) -> None:
    if isinstance(stage, Tokenizes):
        made = list(stage.id_columns)
        if isinstance(stage, Tokenize) and len(made) > 1:
            found.own |= set(made) - {"input_ids"}
        for name in made:
            other = found.engines.get(name, stage.maker)
            found.engines[name] = stage.maker if _alike(other, stage.maker) else None
    elif isinstance(stage, Rename):
        for old, new in stage.names.items():
            if old in found.engines:
                found.engines[new] = found.engines.pop(old)
            if old in found.own:
                found.own = (found.own - {old}) | {new}
    elif isinstance(stage, Pack):
        if stage.column in found.engines:
            found.engines["input_ids"] = found.engines[stage.column]
    elif isinstance(stage, MaskTokens):
        found.masked = True
    elif isinstance(stage, EncodeLabels):
        found.classes[stage.output_column] = _names(stage.classes)


def _alike(one: Engine | None, other: Engine) -> bool:
    return one is other or (one is not None and one.fingerprint() == other.fingerprint())


def _names(classes: Any) -> Mapping[int, str]:
    if isinstance(classes, Mapping):
        names: dict[int, str] = {}
        for name, number in classes.items():
            names[number] = f"{names[number]}, {name}" if number in names else str(name)
        return names
    return {} if isinstance(classes, int) else {k: str(name) for k, name in enumerate(classes)}
