"""``from_ray``: rows of a dataset of Ray Data.

The stage; what it opens is made by the thread that plans, and read by several threads.
"""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

from trainpipes.checks import whole_number
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage_kinds import Source
from trainpipes.shown import shown
from trainpipes.sources.ray.blocks import RayBlocks
from trainpipes.sources.ray.source import RaySource

__all__ = ["FromRay"]


class FromRay(Source):
    """Rows of a ``ray.data.Dataset``.

    Out: rows as Arrow, in the order of the dataset. Cursor: a row number. When the rows are first needed, the
    dataset is carried out once (``materialize()``, with the order kept), and its blocks stay in Ray's object
    store until this program ends; Ray moves to disk what its memory does not hold. Where one materialized
    already is given, its blocks are used. Each block comes to this machine when its rows are due.

    A state knows the dataset by its rows' number, its columns and all of its rows, however Ray cut them into
    blocks. So a dataset that is made anew, on a cluster of another size too, goes on from a state if its
    rows come out the same and in the same order.

    Tensors are fixed-size lists, those of several shapes lists of lists. Columns have one type: where blocks
    have several, the one that holds them all.

    Ranks and workers read the same blocks if the pipeline is handed to them: by Ray, as an argument of the
    function that trains, or by ``Loader(multiprocessing_context="spawn")``. Workers that are forked cannot
    talk to Ray and are refused. A rank that makes the dataset itself carries it out itself, too.

    Args:
        dataset: the dataset.
        block_rows: rows that a shuffle puts in another order as a whole.

    Raises:
        ConfigError: that is no dataset of Ray's.
        SchemaError: a column holds Python objects, or types that no one type holds; once rows are needed.

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
