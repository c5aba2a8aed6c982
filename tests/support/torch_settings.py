"""torch's settings, which training changes, put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["torch_as_before"]


@contextmanager
def torch_as_before() -> Iterator[None]:
    """torch's random state, threads and deterministic mode are at the end as they are now."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
