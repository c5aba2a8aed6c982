"""``from_ray``: rows of a dataset of Ray Data.

The stage; what it opens is made by the thread that plans, and read by several threads.
"""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

from trainpipes._internal.checks import whole_number
from trainpipes._internal.shown import shown
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage_kinds import Source
from trainpipes.sources.ray.blocks import RayBlocks
from trainpipes.sources.ray.source import RaySource

__all__ = ["FromRay"]


class FromRay(Source):
    """Rows of a ``ray.data.Dataset``.

    Out: rows as Arrow, in the order of the dataset. Cursor: a row number. When the rows are first needed, the
    dataset is executed once (``materialize()``, with the order kept), and its blocks stay in Ray's object
    store until this program ends; Ray moves to disk what its memory does not hold. A dataset that is
    materialized already is used as it is. Each block comes to this machine when its rows are due.

    A state holds a fingerprint of the number of rows, the columns and all rows, however Ray cut them into
    blocks. So a state also loads after the dataset was made anew, on a cluster of any size, if the rows are
    the same and in the same order.

    Tensors become fixed-size lists; tensors of several shapes become lists of lists. A column whose blocks
    have several types gets the type that holds all values.

    Ranks and workers read the same blocks if they are given the pipeline: by Ray, as an argument of the
    training function, or by ``Loader(multiprocessing_context="spawn")``. Forked workers cannot talk to Ray
    and are refused. A rank that makes the dataset itself executes it again.

    Args:
        dataset: the dataset.
        block_rows: rows in a block (a shuffle permutes blocks first).

    Raises:
        ConfigError: that is no Ray dataset.
        SchemaError: a column holds Python objects, or types that no one type holds (raised when rows are
            first needed).

    ``tp.from_ray(ray.data.read_json("s3://bucket/chats")).sharding_filter().shuffle(40_960).batch(32)``
    """

    has_blocks = True
    free = frozenset({"dataset"})

    dataset: Any
    _: KW_ONLY
    block_rows: int = 8192

    def check(self) -> None:
        whole_number(self.block_rows, 1, "from_ray(block_rows)", "rows of a block")
        if isinstance(self.dataset, RayBlocks):
            return
        if not all(hasattr(self.dataset, name) for name in ("materialize", "to_arrow_refs")):
            raise ConfigError(
                f"from_ray(dataset) takes a ray.data.Dataset, got {shown(self.dataset)}; for one of Hugging "
                "Face's take from_hf(dataset), for one of torch's from_dataset(dataset)"
            )
        self._set(dataset=RayBlocks(self.dataset))

    def open(self) -> RaySource:
        return RaySource(self.dataset, self.block_rows)

    def __repr__(self) -> str:
        return "from_ray(Dataset)"
