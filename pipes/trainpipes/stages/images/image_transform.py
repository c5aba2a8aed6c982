from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Any, Self

import numpy as np
import torch

from trainpipes._internal.checks import ColumnName, Function, Natural, Seed
from trainpipes.columns.run import Run
from trainpipes.kinds.options import identify
from trainpipes.kinds.stage import Stage, made_once
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.images.image_stages import image_of
from trainpipes.stages.map import Map, same_below


class ImageTransform(RunStage):
    """Apply a transform, such as one of ``torchvision.transforms.v2``, to each image ``[C, H, W]``.

    torch's global generator is seeded for the row before each call, and put back after it: draws
    depend on seed, epoch and row alone. In a process only the thread that iterates calls it. For
    draws from Python's ``random`` or NumPy's global generator use ``map(fn, rng=True)``.

    Args:
        transform: takes a tensor ``[C, H, W]``, uint8 after ``decode_image``, and returns the new
            value.
        column: the image.
        seed: for the draws.
        version: names the transform in checkpoints. Left out, a module is known by how it prints, a
            function by module and name.
        num_workers: processes that call it; 0 for none.

    Raises:
        DataError: a row holds no image.
        ConfigError: with workers, the transform does not pickle.

    >>> import numpy as np, torch, trainpipes as tp
    >>> rows = tp.from_dataset([{"image": np.zeros((1, 1, 1), np.uint8)}] * 3)
    >>> noisy = rows.image_transform(lambda image: image + torch.randint(100, ()), version="1")
    >>> [int(row["image"]) for row in noisy], [int(row["image"]) for row in noisy]
    ([80, 51, 58], [6, 33, 18])
    """

    per_row = True
    makes_objects = True
    by_row = True
    by_epoch = True
    in_caller = True
    versioned = "transform"
    draws_by = "draw from torch's generator, which is seeded for each row, or use map(fn, rng=True)"
    free = frozenset({"num_workers"})

    transform: Function
    _: KW_ONLY
    column: ColumnName = "image"
    seed: Seed = 0
    version: str | None = None
    num_workers: Natural = 0

    _turn = 0  # which one it is of several alike

    def resolve(self, below: Sequence[Stage]) -> Self:
        return self.resolved(_turn=same_below(self, below))

    @made_once
    def _map(self) -> Map:
        name = self.version or str(identify(self.transform))
        found = Map(
            Seeded(self.transform, self.column, str(self), name), rng=True, seed=self.seed,
            num_workers=self.num_workers, method="process",
        )  # fmt: skip
        return found.resolved(_turn=self._turn, _watch=self._draw_watch, _said=str(self))

    @property
    def runs_user_code(self) -> bool:
        return not self.has_workers

    @property
    def has_workers(self) -> bool:
        return self._map.has_workers

    def settle(self, threads: int) -> None:
        self._map.settle(threads)

    def process(self, run: Run) -> Run:
        return self._map.process(run)

    def submit_run(self, run: Run) -> Callable[[], Run] | None:
        return self._map.submit_run(run)


class Seeded:
    def __init__(
        self, transform: Callable[[torch.Tensor], Any], column: str, said: str, name: str
    ) -> None:
        self._transform, self._column = transform, column
        self._said, self._name = said, name

    def fingerprint(self) -> str:
        return self._name

    def __call__(self, row: Any, rng: np.random.Generator) -> dict[str, Any]:
        image = torch.from_numpy(np.array(image_of(row, self._column, self._said)))
        generator = torch.default_generator
        before = generator.get_state()
        # Not torch.manual_seed, which seeds the devices' generators, too.
        generator.manual_seed(int(rng.bit_generator.random_raw()) >> 1)
        try:
            found = self._transform(image)
        finally:
            generator.set_state(before)
        if isinstance(found, torch.Tensor):
            found = found.as_subclass(torch.Tensor)
        return {**row, self._column: found}
