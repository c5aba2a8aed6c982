"""What stands out in a run, with the line to write."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainpipes.engine.planning.plan import Plan
from trainpipes.kinds.stage import Stage
from trainpipes.look.decoded import known_ids
from trainpipes.look.trial.report import TrialReport
from trainpipes.recipe_registry import recipe_function

__all__ = ["with_advice"]

#: Shares from which something stands out: of padding, of waits, and of one stage in the time of all.
PADDING, WAITS, ONE_STAGE = 0.2, 0.1, 0.5
#: Seconds of threads, and steps, from which times mean something.
ENOUGH, STEPS = 0.2, 5


@dataclass(frozen=True)
class Recipe:
    """The recipe that a pipeline is of.

    Args:
        name: of it.
        options: their names.
    """

    name: str
    options: tuple[str, ...]


def with_advice(report: TrialReport, plan: Plan, recipe: str | None = None) -> TrialReport:
    """A report with what stands out in it.

    Args:
        report: of a run.
        plan: of the pipeline.
        recipe: that it is of; its options are named instead of stages.
    """
    of = None
    if recipe is not None:
        of = Recipe(recipe, tuple(inspect.signature(recipe_function(recipe)).parameters))
    found = [
        *_targets(report, of),
        *_padding(report, plan, of),
        *_waits(report, plan),
        *_stage(report, plan, of),
    ]
    return replace(report, advice=tuple(found))


def _targets(report: TrialReport, recipe: Recipe | None) -> Iterator[str]:
    if report.learnt_share == 0:
        longer = "prompts as long as max_length leave none, so raise it"
        if recipe is None or "on_error" in recipe.options:
            longer += ", or leave such rows out, " + (
                'on_error="skip"' if recipe is None else "on_error: skip"
            )
        yield f"0.0% of the tokens are targets, and the loss of such batches is NaN: {longer}"


def _padding(report: TrialReport, plan: Plan, recipe: Recipe | None) -> Iterator[str]:
    share, batch = report.padding_share, plan.chain.batch
    if share is None or share < PADDING or batch is None or batch.batch_size in (None, 1):
        return
    names = {stage.name for stage in plan.chain.stages}
    if batch.name != "batch" or "pack" in names:
        return
    size, columns = batch.batch_size, list(known_ids(plan).engines)
    own = "" if "input_ids" in columns or not columns else f", column={columns[0]!r}"
    buckets = f".bucket_by_length({size}{own}) in place of .batch({size})"
    if recipe is None:
        cure = (
            f"rows of about the same length make batches with less, by {buckets}; or rows that share one, by "
            ".pack(max_length) before it"
        )
    elif "packed" in recipe.options:
        cure = f"rows share one by the option packed: true of {recipe.name}"
    elif "num_buckets" in recipe.options:
        cure = f"batches of about the same length by the option num_buckets: auto of {recipe.name}"
    else:
        cure = f"{recipe.name} has no option for less; in a copy of it write {buckets}"
    yield f"{share:.0%} of the cells are padding: {cure}"


def _waits(report: TrialReport, plan: Plan) -> Iterator[str]:
    share = report.wait_share
    if share is None or share < WAITS or report.steps < STEPS:
        return
    said = f"the loop waits for data in {share:.0%} of its time: "
    if report.num_workers:
        yield said + f"try more workers, --num-workers {2 * report.num_workers}"
    elif plan.runs_user_code:
        yield said + (
            "functions of yours run in the thread that trains; try worker processes, --num-workers 2, which "
            "is Loader(pipe, num_workers=2)"
        )
    elif report.threads is not None:
        yield (
            said
            + f"try more threads, --threads {max(2, 2 * report.threads)}, or leave --threads out"
        )
    else:
        yield (
            said
            + "every core is at work already; the table of stages says which one takes most of it"
        )


def _stage(report: TrialReport, plan: Plan, recipe: Recipe | None) -> Iterator[str]:
    total = sum(report.stages.values())
    if total < ENOUGH or len(report.stages) < 2:
        return
    label, seconds = max(report.stages.items(), key=lambda item: item[1])
    if seconds < ONE_STAGE * total:
        return
    name = label.rpartition(": ")[2].partition(" (")[0]
    cure = _cure(name, plan, recipe)
    if cure:
        yield f"{label} takes {seconds / total:.0%} of the time of all stages: {cure}"


def _cure(name: str, plan: Plan, recipe: Recipe | None) -> str:
    if name in ("tokenize", "chat_template"):
        cure = "`trainpipes tokenize IN OUT` does it once, before training"
        if plan.chain.cache is None and recipe is None:
            cure += "; .cache() behind it does it in the first epoch"
        elif plan.chain.cache is None and recipe is not None and "cache" in recipe.options:
            cure += f"; the option cache: true of {recipe.name} does it in the first epoch"
        return cure
    stage = next((s for s in plan.chain.steps if s.name == name), None)
    if stage is not None and _is_map(stage) and recipe is None:
        return (
            f"let processes do it, .{name}(..., num_workers=2, method='process'), or --num-workers 2; "
            ".cache() behind it keeps what it makes, where that is the same in every epoch"
        )
    if stage is not None and _is_map(stage):
        return "let processes do it, by --num-workers 2"
    if name.startswith("read_"):
        files = (
            "`trainpipes inspect` says whether row groups are too large, and `trainpipes repack` rewrites "
            "the files"
        )
        return files if recipe is not None else f"read fewer columns, by columns=[...]; {files}"
    return ""


def _is_map(stage: Stage) -> bool:
    return "num_workers" in stage.options
