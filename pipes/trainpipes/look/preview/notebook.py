"""Pipelines, loaders and explanations for a notebook: no file is opened to show them.

Everything is escaped that comes from the user. Colours are those of the page, or see-through, so that they
are legible on a light and on a dark one; a drawing has a background of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from trainpipes.errors import TrainpipesError
from trainpipes.loader import Loader
from trainpipes.look.explain import Explanation
from trainpipes.look.pictures.graph import graph
from trainpipes.look.preview.as_html import TEXT
from trainpipes.pipeline import Pipeline

__all__ = ["explanation_html", "loader_html", "pipeline_html"]

CODE = f"{TEXT};margin:.5em 0"
NOTE = "border-left:3px solid rgba(230,159,0,.8);padding-left:.6em;margin:.5em 0"


def pipeline_html(pipeline: Pipeline) -> str:
    """The drawing of a chain, and below it how it is written."""
    code = f'<pre style="{CODE}">{escape(repr(pipeline))}</pre>'
    try:
        drawing = graph(pipeline, counts=False).svg
    except TrainpipesError as error:  # what is wrong is said where the pipeline is used
        return f'<div>{code}<p style="{NOTE}">{escape(str(error))}</p></div>'
    return f"<div>{drawing}<details><summary>as code</summary>{code}</details></div>"


def loader_html(loader: Loader) -> str:
    """Where a loader works and stands, and its pipeline."""
    given = ", ".join(loader._given())
    lines = [("loader", f"Loader({given})" if given else "Loader, all options at their defaults")]
    lines += [("works in", _place(loader)), *_standing(loader)]
    return f"<div>{_table(lines)}{pipeline_html(loader.pipeline)}</div>"


def _place(loader: Loader) -> str:
    if loader.num_workers:
        return f"{loader.num_workers} worker process{'es' * (loader.num_workers != 1)}"
    if loader.threads == 0:
        return "this process, without threads"
    many = "" if loader.threads is None else f" of {loader.threads}"
    return f"threads{many} in this process"


def _standing(loader: Loader) -> list[tuple[str, str]]:
    """Where it stands and how long an epoch is, as far as no file needs to be opened to say so."""
    session = loader._session
    if not session.plan.inputs.is_open:
        return []
    found = []
    try:
        state = session.state()
        if state is not None:
            many = f"{state['m']:,} batch{'es' * (state['m'] != 1)}, over all ranks"
            found.append(("stands in", f"epoch {state['epoch']}, after {many}"))
        found.append(("an epoch has", f"{len(loader):,} batches for this rank"))
    except (TrainpipesError, TypeError):  # others iterate it; or how many there are is not known
        pass
    return found


def explanation_html(explanation: Explanation) -> str:
    """A table, and what a user may want to change."""
    notes = "".join(f'<p style="{NOTE}">{escape(note)}</p>' for note in explanation.notes)
    return f"<div>{_table(explanation.lines)}{notes}</div>"


def _table(lines: Iterable[tuple[str, str]]) -> str:
    rows = "".join(
        f'<tr><th style="text-align:left;white-space:nowrap">{escape(label.strip())}</th>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for label, text in lines
    )
    return f"<table>{rows}</table>"
