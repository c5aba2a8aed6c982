"""What is measured. A job is a module that has

TITLE, TEXT, SLOW       its heading; whether it reads text, and from slow storage
MANY                    whether it reads the files of token ids several times over
ENTRIES, QUICK          who takes part; who in a quick run
ONCE                    whether one run of each will do
MEMORY                  whether memory is to be watched meanwhile
COLUMNS                 (key of a result, heading, format) of its table
measure(make, spec)     runs in the contestant's process, and returns a result: a flat dict
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["JOBS", "job"]

#: In the order in which they run: the states of ``whole_epoch`` are loaded by ``resume``.
JOBS = (
    "whole_epoch",
    "pretokenised",
    "steady",
    "text",
    "resume",
    "epoch_two",
    "one_shard",
    "waiting",
    "waiting_slow",
)


def job(name: str) -> Any:
    """The module of a job."""
    return import_module(f"benchmarks.jobs.{name}")
