"""What tests of commands share."""

from __future__ import annotations

import pytest

from command import Ran
from trainpipes.cli.app import run


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs the command in this process; gives its exit code, and what it prints to stdout and to stderr."""

    def running(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(list(map(str, arguments)))
        return (code, *capsys.readouterr())

    return running
