"""Who takes part, and what each needs. The modules themselves are imported in a contestant's own process."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from benchmarks.contestants.contestant import Contestant

__all__ = ["ENTRIES", "ENVIRONMENTS", "Entry", "Environment"]


@dataclass(frozen=True)
class Environment:
    """What pip installs into an environment of its own.

    Args:
        requires: packages.
        with_dependencies: let pip install theirs too.
    """

    requires: tuple[str, ...]
    with_dependencies: bool = True


#: Versions as they were when the results in README.md were written.
ENVIRONMENTS = {
    "hf": Environment(("datasets==5.2.0",)),
    "grain": Environment(("grain==0.2.18",)),
    # Its dependencies are clients of all clouds, older numpy and transformers, and torchvision.
    "mosaic": Environment(
        (
            "mosaicml-streaming==0.13.0",
            *["brotli", "python-snappy", "cramjam", "xxhash", "zstd", "catalogue"],
        ),
        with_dependencies=False,
    ),
    "litdata": Environment(("litdata==0.2.76",)),
    "lance": Environment(("lancedb==0.40.0", "pylance==14.0.2")),
    "energon": Environment(("megatron-energon==7.4.1",)),
    "spdl": Environment(("spdl==0.8.0",)),
    "webdataset": Environment(("webdataset==1.0.2",)),
}


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Args:
        title: as in tables.
        module, cls: where it is.
        group: "trainpipes", "peer" or "limit".
        environment: a key of ``ENVIRONMENTS``; None for that of the suite.
        converts: whether it writes a format of its own first.
    """

    title: str
    module: str
    cls: str
    group: str = "peer"
    environment: str | None = None
    converts: bool = False

    def load(self) -> type[Contestant]:
        found: type[Contestant] = getattr(
            import_module(f"benchmarks.contestants.{self.module}"), self.cls
        )
        return found


ENTRIES = {
    "ours": Entry("trainpipes", "ours", "Trainpipes", "trainpipes"),
    "ours-serial": Entry("trainpipes, threads=0", "ours", "Serial", "trainpipes"),
    "ours-workers": Entry("trainpipes, 2 workers", "ours", "Workers", "trainpipes"),
    "ours-endless": Entry("trainpipes, repeat()", "ours", "Endless", "trainpipes"),
    "ours-one": Entry("trainpipes, one shard", "ours", "OneShard", "trainpipes"),
    "ours-engine": Entry("trainpipes, engine tokenizers", "ours", "SameEngine", "trainpipes"),
    "ours-cache": Entry("trainpipes, .cache()", "ours", "Cached", "trainpipes"),
    "blog": Entry("row buffer, DataLoader", "row_buffer", "InDataLoader"),
    "blog-workers": Entry("row buffer, 2 workers", "row_buffer", "InWorkers"),
    "blog-stateful": Entry("row buffer, StatefulDataLoader", "row_buffer", "InStatefulDataLoader"),
    "nodes": Entry("torchdata.nodes", "nodes", "Nodes"),
    "hf": Entry("HF datasets, rows", "hf", "Rows", environment="hf"),
    "hf-arrow": Entry("HF datasets, Arrow", "hf", "Arrow", environment="hf"),
    "grain": Entry("Grain", "grain_parquet", "Grain", environment="grain"),
    "mosaic": Entry("MosaicML streaming", "mosaic", "Mosaic", environment="mosaic", converts=True),
    "litdata": Entry("LitData", "lightning", "LitData", environment="litdata", converts=True),
    "lance": Entry("LanceDB", "lance_table", "Lance", environment="lance", converts=True),
    "spdl": Entry("SPDL", "spdl_threads", "Spdl", environment="spdl"),
    "scan": Entry("Parquet scan, 1 thread", "limits", "Scan", "limit"),
    "scan-two": Entry("Parquet scan, 2 threads", "limits", "ScanOnTwo", "limit"),
    "engine": Entry("tokenizers alone, ids read out", "limits", "Engine", "limit"),
    "copy": Entry("copying the padded bytes", "limits", "Copy", "limit"),
}
