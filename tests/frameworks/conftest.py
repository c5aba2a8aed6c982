"""One thread of torch for each test and rank: they share the cores. Imports are done once for all of them.

A test with the mark ``ranks(n)`` runs on n ranks: see ``ranks.py``.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from frameworks.ranks import fork_server, run

pytest.register_assert_rewrite("frameworks.runs")

#: What ranks need that tests do not import themselves.
IMPORTED = (
    "torch._dynamo",  # by the first optimizer
    "pandas",  # by the first pa.array
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torchdata.stateful_dataloader",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trainpipes.loader",
    "trainpipes.testing",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n): runs on n ranks")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    for name in IMPORTED:
        if name.partition(".")[0] in {*sys.modules, "pandas"}:  # of what is tested
            with suppress(ImportError):
                import_module(name)
    fork_server()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with TemporaryDirectory() as folder:
        run(partial(pyfuncitem.obj, **given), marker.args[0], Path(folder, "ranks"))
    return True


@pytest.fixture(autouse=True)
def one_thread(torch_as_before: None) -> None:
    torch.set_num_threads(1)
