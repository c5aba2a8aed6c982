"""What stages that make token ids share: the tokenizer, and what it says to later stages."""

from __future__ import annotations

from typing import Any

from trainpipes.columns.rectangles import Side
from trainpipes.kinds.stage import made_once
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.targets import Targets
from trainpipes.tokenizers.callable import Function
from trainpipes.tokenizers.engine import Engine
from trainpipes.tokenizers.load import load
from trainpipes.tokenizers.parallelism import take_turns


class Tokenizes(RunStage):
    """A stage that makes token ids of its option ``tokenizer``, and says by ``on_error`` what
    becomes of rows without a target."""

    asks_inputs = True

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return bool(self.options["on_error"] != "skip")

    @made_once
    def _targets(self) -> Targets:
        length = self.options.get("max_length")
        return Targets(self, f"raise max_length={length}" if length else "")

    def report(self) -> str:
        return str(self._targets)

    def _shaping_error(self) -> str | None:
        """What ``on_error`` adds to an identity: only "skip" shapes the rows."""
        return None if self.keeps_rows else "skip"

    @made_once
    def _engine(self) -> Engine:
        return load(self.options["tokenizer"], self.options.get("engine", "auto"))

    @property
    def resolved_options(self) -> dict[str, Any]:
        name = getattr(self.options["tokenizer"], "name_or_path", None) or str(self._engine)
        return {
            **self.options,
            "tokenizer": {"name": name, "content": self._engine.fingerprint()},
        }

    @property
    def id_columns(self) -> list[str]:
        """Columns of token ids that come out."""
        return ["input_ids"]

    @property
    def maker(self) -> Engine:
        """What makes the ids."""
        return self._engine

    @property
    def pad_id(self) -> int:
        """The tokenizer's pad token; 0 if it has none."""
        return self._engine.pad_id() or 0

    @property
    def says_pad_id(self) -> bool:
        """Whether the tokenizer can say what it is padded with: a function cannot."""
        return not isinstance(self._engine, Function)

    @property
    def padding_side(self) -> Side:
        """The side that transformers' settings of the tokenizer pad on; "right" without any."""
        return self._engine.padding() or "right"

    def runs_on(self) -> str:
        """The tokenizer and what makes its ids, in words: what has run, once something has; nothing
        for bytes."""
        said = self._engine.runs_on()
        return f"{self._engine}: {said}" if said else ""

    def settle(self, threads: int) -> None:
        take_turns(threads)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": self._engine}  # knows what its file held
