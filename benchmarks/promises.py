"""What README, docs and the project promise, each with the least that a run of ``--check`` must find.

One entry a promise: what it is, its bound, the figure (job, contestant, key), what that is divided by, and
where it is promised. Jobs are those of the suite, and the measurements of ``alone.py``. Where a figure is
quoted from a full run, the bound leaves room for what a start costs, of which a small run is a larger part;
where it is "about" so many microseconds, for slower machines.
"""

from __future__ import annotations

from benchmarks.targets import TARGETS, Cell, Target, rates

__all__ = ["PROMISES"]


def alone(job: str, *keys: str) -> tuple[Cell, ...]:
    """Figures of a measurement beside the suite."""
    return tuple((job, "ours", key) for key in keys)


def least(
    what: str,
    must: float,
    above: tuple[Cell, ...],
    below: tuple[Cell, ...] = (),
    *,
    where: str,
    percent: bool = False,
) -> Target:
    """A figure that is to be so large."""
    return Target(what, must, None, above, below, percent=percent, where=where)


def most(
    what: str,
    must: float,
    above: tuple[Cell, ...],
    below: tuple[Cell, ...] = (),
    *,
    where: str,
    percent: bool = False,
) -> Target:
    """A figure that is to be no larger."""
    return Target(what, must, None, above, below, True, percent, where)


SPEED, DATASETS, PACKING, MIXING = (
    "benchmarks/README.md",
    "docs/datasets.md",
    "docs/tokens.md",
    "docs/mixing.md",
)
STEADY = "benchmarks/jobs/steady.py"
STATE, SCALE = "benchmarks/state.py", "benchmarks/scale.py"
COLLATING = "benchmarks/collating.py"
WIDE = "benchmarks/wide.py"
FORMATS = "benchmarks/README.md"

PROMISES = (
    *TARGETS,
    # The tables of speeds: against the row buffer in a DataLoader.
    least("every row once in an epoch (1: yes)", 1, (("whole_epoch", "ours", "right"),), where=SPEED),
    least("a resume goes on exactly (1: yes)", 1, (("resume", "ours", "right"),), where=SPEED),
    least("pretokenised, 13 times the row buffer", 12, rates("pretokenised", "ours"),
          rates("pretokenised", "blog"), where=SPEED),
    least("pretokenised, 20 times torchdata.nodes", 15, rates("pretokenised", "ours"),
          rates("pretokenised", "nodes"), where=SPEED),
    least("Loader with 2 workers, 5.5 times the row buffer", 5, rates("pretokenised", "ours-workers"),
          rates("pretokenised", "blog"), where=SPEED),
    least("text, at least 12 times the row buffer", 11, rates("text", "ours"),
          rates("text", "blog"), where=SPEED),
    least("text by the same engine, 1.5 times the row buffer", 1.4, rates("text", "ours-engine"),
          rates("text", "blog"), where=SPEED),
    least("epoch 2 with .cache(), 37 times the row buffer", 33, (("epoch_two", "ours-cache", "two"),),
          rates("text", "blog"), where=SPEED),
    # A steady stream.
    least("a long epoch, of the two-thread scan", 0.40, rates("steady", "ours"),
          rates("steady", "scan-two"), where=STEADY),
    least("the same, two threads / none", 1.4, rates("steady", "ours"), rates("steady", "ours-serial"),
          where=STEADY),
    least("the same, first stretch / median", 0.5, (("steady", "ours", "first"),), where=STEADY),
    least("the same, slowest later stretch / median", 0.7, (("steady", "ours", "slowest"),), where=STEADY),
    most("the same, peak memory / what explain() says, two threads and none", 1.5,
         (("steady", "ours", "of told"), ("steady", "ours-serial", "of told")), where=STEADY),
    most("the same, 8 ranks that wait for the slowest / the mean one", 1.1,
         (("steady", "ours", "slowest rank"),), where=STEADY),
    least("an epoch that is mixed as a whole, of the scan", 0.35, (("steady", "ours", "once"),),
          (("steady", "scan-two", "once"),), where=STEADY),
    least("the same, two threads / none", 1.1, (("steady", "ours", "once"),),
          (("steady", "ours-serial", "once"),), where=STEADY),
    # Memory maps.
    least("token file: as fast as nanoGPT's loop or faster, global order", 1,
          alone("memmap", "nanoGPT ms"), alone("memmap", "global ms"), where=DATASETS),
    least("token file: the same, shuffle(8192)", 1, alone("memmap", "nanoGPT ms"),
          alone("memmap", "window ms"), where=DATASETS),
    most("token file: ms a batch of 12 x 1024 with labels", 0.5,
         alone("memmap", "global ms", "window ms"), where=DATASETS),
    least("images: 10 to 50 times a DataLoader over JPEG files", 8, alone("memmap", "images, DataLoader"),
          where=DATASETS),
    least("images: 8 times from_dataset over the same", 7, alone("memmap", "images, from_dataset"),
          where=DATASETS),
    # Rows of Python's, and columns of numbers.
    least("a list of ints, of what a plain DataLoader makes", 0.7, alone("collating", "ints"),
          where=COLLATING),
    least("lists of tuples and of dicts, the same", 0.7, alone("collating", "tuples", "dicts"),
          where=COLLATING),
    least("16 columns of floats by collate(), of what pad_collate() makes", 0.8,
          alone("collating", "columns"), where=COLLATING),
    # Orders.
    most("a global order, about 30 ns a row", 45, alone("samplers", "ns a row"), where=DATASETS),
    # Packing.
    most("pack(): empty, 0.1 %", 0.002, alone("packing", "best_fit, 1024"), where=PACKING, percent=True),
    most("pack(buffer_size=256): empty, 0.4 %", 0.006, alone("packing", "best_fit, 256"), where=PACKING,
         percent=True),
    most("pack(first_fit): empty, 0.8 %", 0.011, alone("packing", "first_fit, 1024"), where=PACKING,
         percent=True),
    most("pack(): documents split that would fit", 0, alone("packing", "split"), where=PACKING,
         percent=True),
    most("bucket_by_length(32): empty, 28 %", 0.32, alone("packing", "bucket_by_length(32)"),
         where=PACKING, percent=True),
    most("bucket_by_length(max_tokens): empty, 13 %", 0.16,
         alone("packing", "bucket_by_length(max_tokens)"), where=PACKING, percent=True),
    most("pack(): ns a token, 5 to 10", 12, alone("packing", "ns a token"), where=PACKING),
    most("pack(): of what tokenizing costs, 1 %", 0.02, alone("packing", "of tokenizing"),
         where=PACKING, percent=True),
    # Even steps.
    least("buckets: tokens of ranks x largest, 64 ranks", 0.70, alone("even", "buckets, 64 ranks"),
          where=PACKING),
    least("the same, 8 ranks", 0.75, alone("even", "buckets, 8 ranks"), where=PACKING),
    least("buckets of uniform, GSM8K and WikiText-2 lengths, the least: 64 ranks, 0.88", 0.80,
          alone("even", "buckets, other lengths, 64 ranks"), where=PACKING),
    least("the same, 8 ranks, 0.91", 0.84, alone("even", "buckets, other lengths, 8 ranks"),
          where=PACKING),
    most("balance(): attention, largest / mean of 64 ranks, pack(2048).batch(2), these lengths: 1.18",
         1.30, alone("even", "attention, pack, other lengths"), where=PACKING),
    most("balance(): attention, largest / mean of 64 ranks, pack(2048).batch(2) and batch(max_tokens=4096)",
         1.35, alone("even", "attention, pack", "attention, max_tokens"), where=PACKING),
    # Tables of many columns.
    least("120 columns of numbers: of forty lines over Arrow, 1 to 1.2", 0.8, alone("wide", "of forty lines"),
          where=WIDE),
    least("the same as float32, which the forty lines make, 1.3", 1.05,
          alone("wide", "of forty lines, float32"), where=WIDE),
    least("the same without threads, 1.0", 0.88, alone("wide", "of forty lines, float32, no threads"),
          where=WIDE),
    least("the same, float64, of the scan, 0.45 to 0.6", 0.38, alone("wide", "of the scan"), where=WIDE),
    # Tables with versions.
    least("a Lance table in a global order, of Lance's own take, 0.9 to 1.3", 0.5,
          alone("tables", "of take, 256", "of take, 4096"), where="docs/tables.md"),
    # Mixing.
    most("choosing by short weights, 0.02 us a row", 0.04, alone("mix", "short weights"), where=MIXING),
    most("choosing of 10 by many digits, up to 2 us", 3, alone("mix", "10 sources, many digits"),
         where=MIXING),
    most("choosing by tokens, 0.5 us a row", 0.8, alone("mix", "by tokens"), where=MIXING),
    most("rows off the share after 100,000 draws", 1, alone("mix", "rows off"), where="benchmarks/mix.py"),
    # States.
    most("state of 64 shards, bytes", 16_384, alone("state", "bytes of 64"), where=STATE),
    most("state of a counted pipeline, bytes", 1024, alone("state", "bytes, counted"),
         where="docs/resume.md"),
    most("a shard in a checkpoint, about 80 bytes", 90, alone("state", "bytes a shard"),
         where="docs/resume.md"),
    most("a delivered batch, us", 5, alone("state", "delivered, us"), where=STATE),
    most("state_dict(), us a shard", 10, alone("state", "us a shard"), where=STATE),
    # Starting, functions, memory.
    most("a footer, 0.1 ms", 0.15, alone("footers", "ms a footer"), where="docs/cache.md"),
    most("1,000 files with an index, about 20 ms", 30, alone("footers", "ms with the index"),
         where="docs/cache.md"),
    most("import trainpipes, of import torch, 1.3", 1.5, alone("imports", "of torch"), where=SPEED),
    # Formats.
    most("Parquet, of pyarrow", 1.15, alone("formats", "Parquet"), where=FORMATS),
    most("Arrow, lz4 or zstd, of pyarrow", 1.6, alone("formats", "Arrow, lz4", "Arrow, zstd"),
         where=FORMATS),
    most("Arrow, not compressed, of copying from its map", 1.8, alone("formats", "Arrow"), where=FORMATS),
    most("JSON lines, of pyarrow.json", 1.3, alone("formats", "JSON lines"), where=FORMATS),
    most("CSV, of pyarrow.csv", 1.3, alone("formats", "CSV"), where=FORMATS),
    most("text, of splitting bytes", 1.5, alone("formats", "text"), where=FORMATS),
    most("NumPy, of copying from np.load(mmap_mode)", 1.8, alone("formats", "NumPy"), where=FORMATS),
    most("images, of open().read()", 2.8, alone("formats", "images"), where=FORMATS),
    most("index of JSON lines, s a GB", 1, alone("formats", "JSON lines: index, s a GB"), where=FORMATS),
    least("tar archives, 2 times webdataset", 2, alone("webdataset", "with its index"), where=FORMATS),
    least("from_hf, rows, 5 times the Dataset", 5, alone("from_hf", "rows"), where=FORMATS),
    least("from_hf, batches of tensors, 5 times the Dataset", 5, alone("from_hf", "batches"), where=FORMATS),
    most("planning for 4,096 ranks, s (1 of the 10 M row groups)", 1, alone("scale", "seconds"), where=SCALE),
    most("planning, GB (the same)", 0.2, alone("scale", "gigabytes"), where=SCALE),
    least("map in 2 threads, against a DataLoader with 2 workers", 0.9, alone("map_workers", "threads"),
          where="benchmarks/map_workers.py"),
    least("map in 2 processes, against the same, 0.77 to 0.82", 0.75, alone("map_workers", "processes"),
          where="benchmarks/map_workers.py"),
    least("2 workers of a Loader, pictures, 1.2 times the same", 1.1,
          alone("map_workers", "a Loader's workers"), where="benchmarks/map_workers.py"),
    least("2 workers of a Loader, 1 ms of Python, against the same, 0.96", 0.85,
          alone("map_workers", "a Loader's workers, Python"), where="benchmarks/map_workers.py"),
    least("images decoded, 1.2 times a DataLoader with 2 workers", 1.1,
          alone("images_decode", "of a DataLoader"), where="docs/images.md"),
    least("sound decoded, 0.99 to 1.2 times a DataLoader with 2 workers", 0.8,
          alone("audio", "of a DataLoader"), where="docs/sound.md"),
    least("sound decoded, of decoding alone in 2 threads, 0.78 to 0.9", 0.65, alone("audio", "of threads"),
          where="docs/sound.md"),
    least("the same by processor time, 0.83 to 0.96", 0.8, alone("audio", "processor, of threads"),
          where="docs/sound.md"),
    least("clips of videos, 1.2 times a DataLoader with 2 workers", 1.0, alone("videos", "of a DataLoader"),
          where="docs/video.md"),
    least("clips of videos, of decoding alone in 2 threads, 0.95 to 1.05", 0.8,
          alone("videos", "of threads"), where="docs/video.md"),
    least("the same by processor time, 0.93", 0.85, alone("videos", "processor, of threads"),
          where="docs/video.md"),
    most("memory after epoch 8, against epoch 3", 1.1, alone("memory", "grown"),
         where="docs/speed.md"),
)  # fmt: skip
