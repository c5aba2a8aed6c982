"""Batches of large tensors: the values of torch's own indexing, whatever the memory looks like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import trainpipes as tp

ROWS, WIDTH = 6000, 64
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row after row": lambda x: x,
    "column after column": lambda x: x.t().contiguous().t(),
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row many times": lambda x: x[:1].expand(ROWS, WIDTH),
}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_batch_has_the_rows_of_its_tensor(
    layout: str, dtype: torch.dtype, shuffled: bool
) -> None:
    values = LAYOUTS[layout](torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH).to(dtype))
    before = values.clone()
    pipe = tp.from_tensors(x=values, row=torch.arange(ROWS))
    pipe = (pipe.shuffle(ROWS, seed=1) if shuffled else pipe).batch(5500).collate()
    seen = []
    for batch in pipe:
        assert batch["x"].is_contiguous()
        assert torch.equal(batch["x"], before[batch["row"]])
        batch["x"].zero_()  # a batch is its user's
        seen += batch["row"].tolist()
    assert sorted(seen) == list(range(ROWS))
    assert torch.equal(values, before)
