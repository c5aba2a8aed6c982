"""One thread of torch for each test and rank: they share the cores."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(torch_as_before: None) -> None:
    torch.set_num_threads(1)
