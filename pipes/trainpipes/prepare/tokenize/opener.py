"""Where files are made: in this process, in several of this machine, or on a Ray cluster."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trainpipes.integrations.on_ray import RayCluster
from trainpipes.kinds.stage import Stage
from trainpipes.prepare.tokenize.cut import open_plan
from trainpipes.prepare.tokenize.formats import Form
from trainpipes.prepare.tokenize.make import Made, Maker, named
from trainpipes.prepare.tokenize.tasks import Task
from trainpipes.prepare.tokenize.workers import Tell, made_by_processes, made_here
from trainpipes.stages.tokenizing import Tokenizes
from trainpipes.storage.writers.storage import Storage


@dataclass
class Opener:
    """Opens the plan in a process. Pickles."""

    stages: tuple[Stage, ...]
    source: Any
    schemas: dict[str, pa.Schema | None]
    form: Form
    schema: pa.Schema
    ids: list[str]
    storage: Storage
    token: str

    def __call__(self) -> Callable[[Task, Tell], Made]:
        plan = open_plan(self.stages, self.source)
        plan.inputs.schemas.adopt(self.schemas)
        maker = Maker(plan, self.form, self.schema, self.ids)

        def make(task: Task, tell: Tell) -> Made:
            # Two tries of a task may run at once, where a node is only thought to be dead.
            with self.storage.making(task.name, f"{self.token}{secrets.token_hex(2)}") as path:
                made = maker.make(task, path, tell)
                self.storage.put(path, task.name)
            return made

        return make


@dataclass
class _RayOpener:
    """The same for Ray, where an error says of which file it is. Pickles."""

    opener: Opener

    def __call__(self) -> Callable[[Task, Tell], Made]:
        make = self.opener()

        def make_named(task: Task, tell: Tell) -> Made:
            try:
                return make(task, tell)
            except Exception as error:
                named(error, task)
                raise

        return make_named


def in_processes(
    missing: list[Task], opener: Opener, tell: Tell, processes: int
) -> Generator[tuple[Task, Made], None, None]:
    if processes == 1 or len(missing) < 2:
        return made_here(missing, opener, tell)
    return made_by_processes(missing, opener, tell, processes)


def on_ray(
    cluster: RayCluster, missing: list[Task], opener: Opener, tell: Tell
) -> Generator[tuple[Task, Made], None, None]:
    for stage in opener.stages:
        if isinstance(stage, Tokenizes):
            stage.maker.carry()
    return cluster.run(_RayOpener(opener), missing, name_of=_name, tell=tell)


def _name(task: Task) -> str:
    return f"{task.name} of {task.source}"
