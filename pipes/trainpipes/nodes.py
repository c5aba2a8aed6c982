"""All stages by their classes, to be put together as torchdata nodes.

Each is a ``torchdata.nodes.BaseNode`` built as ``Stage(source, ...)``: a chain of them gives just what
the pipeline of the same stages gives, and can come before or after torchdata's own nodes.

``reset()``, ``next()`` and ``state_dict()`` are as torchdata's nodes have them: the state after an epoch's
last item gives no more items, and the ``reset()`` after it begins the next epoch. The state of a node
that is not ours is kept in that of the chain after it. It may hold what JSON can, tuples, bytes, NumPy
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

from trainpipes.sources.arrow import from_arrow, read_arrow
from trainpipes.sources.combined import concat, zip
from trainpipes.sources.files import list_files
from trainpipes.sources.hf import from_hf
from trainpipes.sources.memmap import from_memmap
from trainpipes.sources.memory import from_dataset, from_iterable, from_tensors, from_torchdata
from trainpipes.sources.mixed import mix
from trainpipes.sources.numpy import read_numpy
from trainpipes.sources.own_format import read_files
from trainpipes.sources.parquet import read_parquet
from trainpipes.sources.tar import read_webdataset
from trainpipes.sources.text import read_csv, read_json, read_text
from trainpipes.sources.whole_files import read_bytes, read_images
from trainpipes.stage_node import StageNode, node_of, start_of
from trainpipes.stages import (
    batch,
    bucket_by_length,
    cache,
    chat_template,
    collate,
    columns,
    device,
    filter,
    flat_map,
    labels,
    map,
    map_batches,
    mask_tokens,
    order,
    pack,
    pad_collate,
    sample,
    tokenize,
    tokenizing,
    truncate,
)
from trainpipes.stages.images import decode_image, image_stages, image_transform

AddLabels = node_of(labels.AddLabels)
Batch = node_of(batch.Batch)
BucketByLength = node_of(bucket_by_length.BucketByLength)
Cache = node_of(cache.Cache)
CenterCrop = node_of(image_stages.CenterCrop)
ChatTemplate = node_of(chat_template.ChatTemplate)
Collate = node_of(collate.Collate)
Concat = start_of(concat.Concat)
DecodeImage = node_of(decode_image.DecodeImage)
DropColumns = node_of(columns.DropColumns)
EncodeLabels = node_of(labels.EncodeLabels)
Enumerate = node_of(columns.Enumerate)
Filter = node_of(filter.Filter)
FlatMap = node_of(flat_map.FlatMap)
Flip = node_of(image_stages.Flip)
FromArrow = start_of(from_arrow.FromArrow)
FromDataset = start_of(from_dataset.FromDataset)
FromHf = start_of(from_hf.FromHf)
FromIterable = start_of(from_iterable.FromIterable)
FromMemmap = start_of(from_memmap.FromMemmap)
FromTensors = start_of(from_tensors.FromTensors)
FromTorchdata = start_of(from_torchdata.FromTorchdata)
ImageTransform = node_of(image_transform.ImageTransform)
ListFiles = start_of(list_files.ListFiles)
Map = node_of(map.Map)
MapBatches = node_of(map_batches.MapBatches)
MaskTokens = node_of(mask_tokens.MaskTokens)
Mix = start_of(mix.Mix)
Normalize = node_of(image_stages.Normalize)
Pack = node_of(pack.Pack)
PadCollate = node_of(pad_collate.PadCollate)
Pin = node_of(device.Pin)
RandomCrop = node_of(image_stages.RandomCrop)
RandomResizedCrop = node_of(image_stages.RandomResizedCrop)
ReadArrow = node_of(read_arrow.ReadArrow)
ReadBytes = node_of(read_bytes.ReadBytes)
ReadCsv = node_of(read_csv.ReadCsv)
ReadFiles = node_of(read_files.ReadFiles)
ReadImages = node_of(read_images.ReadImages)
ReadJson = node_of(read_json.ReadJson)
ReadNumpy = node_of(read_numpy.ReadNumpy)
ReadParquet = node_of(read_parquet.ReadParquet)
ReadText = node_of(read_text.ReadText)
ReadWebdataset = node_of(read_webdataset.ReadWebdataset)
Rename = node_of(columns.Rename)
Repeat = node_of(order.Repeat)
Resize = node_of(image_stages.Resize)
Sample = node_of(sample.Sample)
Select = node_of(columns.Select)
ShardingFilter = node_of(order.ShardingFilter)
Shuffle = node_of(order.Shuffle)
Skip = node_of(order.Skip)
Split = node_of(sample.Split)
Take = node_of(order.Take)
To = node_of(device.To)
Tokenize = node_of(tokenize.Tokenize)
TokenizedBy = node_of(tokenizing.TokenizedBy)
Truncate = node_of(truncate.Truncate)
WithColumns = node_of(map_batches.WithColumns)
Zip = start_of(zip.Zip)

__all__ = [name for name, value in sorted(vars().items()) if isinstance(value, type(StageNode))]
