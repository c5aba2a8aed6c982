"""All stages by their classes, to be put together as torchdata nodes.

Each is a ``torchdata.nodes.BaseNode`` built as ``Stage(source, ...)``: a chain of them gives just what
the pipeline of the same stages gives, and stands below or above torchdata's own nodes.

``reset()``, ``next()`` and ``state_dict()`` are as torchdata's nodes have them: the state after an epoch's
last item gives no more items, and the ``reset()`` after it begins the next epoch. The state of a node
that is not ours is kept in that of the chain above it. It may hold what JSON can, tuples, bytes, NumPy
arrays and tensors.

>>> import pyarrow as pa
>>> from torchdata.nodes import Loader
>>> from trainpipes.nodes import Batch, FromArrow, Shuffle
>>> rows = FromArrow(table=pa.table({"x": [1, 2, 3, 4]}))
>>> loader = Loader(Batch(Shuffle(rows, 4, seed=1), 2))
>>> for batch in loader:
...     print(batch)
[{'x': 3}, {'x': 2}]
[{'x': 1}, {'x': 4}]
"""

from trainpipes.runtime.stage import Stage
from trainpipes.sources.arrow import FromArrow
from trainpipes.sources.concat import Concat
from trainpipes.sources.dataset import FromDataset
from trainpipes.sources.files import ListFiles
from trainpipes.sources.iterable import FromIterable
from trainpipes.sources.memmap import FromMemmap
from trainpipes.sources.mix import Mix
from trainpipes.sources.parquet import ReadParquet
from trainpipes.sources.tensors import FromTensors
from trainpipes.stages.add_labels import AddLabels
from trainpipes.stages.batch import Batch
from trainpipes.stages.bucket_by_length import BucketByLength
from trainpipes.stages.cache import Cache
from trainpipes.stages.chat_template import ChatTemplate
from trainpipes.stages.collate import Collate
from trainpipes.stages.columns import Rename, Select
from trainpipes.stages.draw import Draw
from trainpipes.stages.enumerate import Enumerate
from trainpipes.stages.filter import Filter
from trainpipes.stages.flat_map import FlatMap, Unbatch
from trainpipes.stages.map import Map
from trainpipes.stages.map_batches import MapBatches
from trainpipes.stages.mask_tokens import MaskTokens
from trainpipes.stages.pack import Pack
from trainpipes.stages.pad_collate import PadCollate
from trainpipes.stages.pin import Pin
from trainpipes.stages.repeat import Repeat
from trainpipes.stages.sample import Sample
from trainpipes.stages.sharding_filter import ShardingFilter
from trainpipes.stages.shuffle import Shuffle
from trainpipes.stages.split import Split
from trainpipes.stages.take import Skip, Take
from trainpipes.stages.to import To
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.truncate import Truncate

__all__ = [
    "AddLabels",
    "Batch",
    "BucketByLength",
    "Cache",
    "ChatTemplate",
    "Collate",
    "Concat",
    "Draw",
    "Enumerate",
    "Filter",
    "FlatMap",
    "FromArrow",
    "FromDataset",
    "FromIterable",
    "FromMemmap",
    "FromTensors",
    "ListFiles",
    "Map",
    "MapBatches",
    "MaskTokens",
    "Mix",
    "Pack",
    "PadCollate",
    "Pin",
    "ReadParquet",
    "Rename",
    "Repeat",
    "Sample",
    "Select",
    "ShardingFilter",
    "Shuffle",
    "Skip",
    "Split",
    "Stage",
    "Take",
    "To",
    "Tokenize",
    "Truncate",
    "Unbatch",
]
