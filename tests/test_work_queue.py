"""Items handed out and done in any order are each done once an epoch, over kills and ranks."""

from __future__ import annotations

import pytest

from work_runs import Run


@pytest.mark.filterwarnings("ignore:5 ranks do not divide")
@pytest.mark.parametrize("part", range(10))
def test_each_item_is_done_once(part: int) -> None:
    for seed in range(part * 40, part * 40 + 40):
        run = Run(seed)
        run.go()
        run.check()
