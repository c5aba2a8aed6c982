"""One process of ``python -m benchmarks.elastic``: a rank that reads through one library, saves and resumes.

Each library is a function. It makes the loader that its documentation shows, restores the states where there
are any, and gives batches (lists of row numbers) and a function that returns the state.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.elastic import BUFFER, ROWS

Made = tuple[Iterator[Any], Callable[[], Any]]


@dataclass
class Job:
    """What a rank is to do.

    Args:
        data: the folder of Parquet files ``*.parquet``, with a column ``row``.
        own: a folder for a format of the library's own.
        batch: rows of a batch of this rank.
        states: of all ranks that saved, in order; empty at the start.
    """

    data: Path
    own: Path
    rank: int
    ranks: int
    workers: int
    batch: int
    states: list[Any]

    @property
    def mine(self) -> Any:
        """The state of the same rank; of a rank that was not there, that of another one."""
        return self.states[self.rank % len(self.states)]


def numbers(rows: list[Any]) -> Any:
    import torch

    return torch.tensor([int(row["row"]) for row in rows])


def same(row: Any) -> Any:
    return row


def trainpipes(job: Job) -> Made:
    import trainpipes as tp

    rows = tp.read_parquet(str(job.data)).sharding_filter().shuffle(BUFFER, seed=0).map(same)
    loader = tp.Loader(rows.batch(job.batch).collate(), num_workers=job.workers)
    if job.states:
        loader.load_state_dict(tp.merge_states(job.states))
    return (batch["row"].tolist() for batch in loader), loader.state_dict


def hf(job: Job) -> Made:
    import datasets
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # type: ignore[attr-defined]
    files = sorted(map(str, job.data.glob("*.parquet")))
    rows: Any = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    rows = split_dataset_by_node(rows.shuffle(seed=0, buffer_size=BUFFER), job.rank, job.ranks)
    loader = StatefulDataLoader(
        rows, batch_size=job.batch, num_workers=job.workers, collate_fn=numbers
    )
    if job.states:
        loader.load_state_dict(job.mine)
    return iter(loader), loader.state_dict


def stateful_map(job: Job) -> Made:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rows: Any = range(ROWS)
    sampler = StatefulDistributedSampler(rows, job.ranks, job.rank, shuffle=True, seed=0)
    loader = StatefulDataLoader(
        rows, job.batch, sampler=sampler, num_workers=job.workers, collate_fn=list
    )
    if job.states:
        loader.load_state_dict(job.mine)
    return iter(loader), loader.state_dict


def stateful_iterable(job: Job) -> Made:
    from torch.utils.data import IterableDataset, get_worker_info
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Shuffled(IterableDataset[int]):
        """Each worker of each rank gives every n-th row of a permutation, and keeps how many it gave."""

        given = 0

        def __iter__(self) -> Iterator[int]:
            worker = get_worker_info()
            workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
            order = random.Random(0).sample(range(ROWS), ROWS)
            for row in order[job.rank * workers + number :: job.ranks * workers][self.given :]:
                self.given += 1
                yield row

        def state_dict(self) -> dict[str, int]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.given = state["given"]

    loader = StatefulDataLoader(
        Shuffled(), batch_size=job.batch, num_workers=job.workers, collate_fn=list
    )
    if job.states:
        loader.load_state_dict(job.mine)
    return iter(loader), loader.state_dict


def mosaic(job: Job) -> Made:
    import_module("benchmarks.contestants.mosaic")  # stands in for torchvision
    import streaming

    if not (job.own / "index.json").exists():
        with streaming.MDSWriter(
            out=str(job.own), columns={"row": "int"}, size_limit=2000
        ) as writer:
            for row in range(ROWS):
                writer.write({"row": row})
    rows = streaming.StreamingDataset(
        local=str(job.own), shuffle=True, shuffle_seed=0, shuffle_block_size=BUFFER, batch_size=job.batch
    )  # fmt: skip
    loader = streaming.StreamingDataLoader(
        rows, batch_size=job.batch, num_workers=job.workers, collate_fn=numbers
    )
    if job.states:
        loader.load_state_dict(job.states[0])
    return iter(loader), loader.state_dict


def litdata(job: Job) -> Made:
    import litdata

    if not (job.own / "index.json").exists():
        litdata.optimize(
            fn=lambda row: {"row": row}, inputs=list(range(ROWS)), output_dir=str(job.own), num_workers=1,
            chunk_size=120, start_method="fork",
        )  # fmt: skip
    rows = litdata.StreamingDataset(str(job.own), shuffle=True, drop_last=False, seed=0)
    loader = litdata.StreamingDataLoader(
        rows, batch_size=job.batch, num_workers=job.workers, collate_fn=numbers
    )
    if job.states:
        loader.load_state_dict(job.states[0])
    return iter(loader), loader.state_dict


def lance(job: Job) -> Made:
    import lancedb
    import pyarrow as pa
    from lancedb.streaming import StreamingDataLoader, StreamingDataset

    base = lancedb.connect(str(job.own))
    if not (job.own / "rows.lance").exists():
        base.create_table("rows", pa.table({"row": range(ROWS)}))
    rows = StreamingDataset(
        base.open_table("rows"), num_splits=12, shuffle_seed=0, rank=job.rank, world_size=job.ranks
    )
    if job.states:
        rows.load_state_dict(StreamingDataset.merge_state_dicts(job.states))
    loader = StreamingDataLoader(
        rows,
        batch_size=job.batch,
        num_workers=job.workers,
        collate_fn=numbers,
        **({"multiprocessing_context": "spawn"} if job.workers else {}),
    )
    return iter(loader), rows.state_dict


def grain_rows() -> Any:
    import grain

    return grain.MapDataset.source(range(ROWS)).shuffle(seed=0)


def grain(job: Job) -> Made:
    import grain

    rows = grain_rows()[job.rank :: job.ranks].to_iter_dataset().batch(job.batch)
    if job.workers:
        rows = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers))
    batches = iter(rows)
    if job.states:
        batches.set_state(job.mine)
    return batches, batches.get_state


def grain_elastic(job: Job) -> Made:
    import grain

    workers = grain.MultiprocessingOptions(num_workers=job.workers) if job.workers else None
    batches = iter(
        grain.experimental.ElasticIterator(
            grain_rows(), job.batch * job.ranks,
            grain.sharding.ShardOptions(job.rank, job.ranks), multiprocessing_options=workers,
        )
    )  # fmt: skip
    if job.states:
        batches.set_state(job.mine)
    return batches, batches.get_state


def energon(job: Job) -> Made:
    from megatron import energon

    if not (job.own / ".nv-meta" / "dataset.yaml").exists():
        for part in range(12):
            with tarfile.open(job.own / f"{part:02}.tar", "w") as archive:
                for row in range(part, ROWS, 12):
                    content = str(row).encode()
                    member = tarfile.TarInfo(f"{row:06}.txt")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        command = [str(Path(sys.executable).parent / "energon"), "prepare", "--non-interactive"]
        options = [
            "--split-ratio",
            "1,0,0",
            "--sample-type",
            "CrudeWebdataset",
            "--num-workers",
            "1",
        ]
        subprocess.run([*command, *options, str(job.own)], check=True, capture_output=True)

    class Rows(energon.DefaultTaskEncoder):  # type: ignore[misc]
        cookers = (energon.Cooker(energon.stateless(cook)),)

        def batch(self, samples: list[Any]) -> Any:
            return [int(sample.text) for sample in samples]

    config = energon.WorkerConfig(rank=job.rank, world_size=job.ranks, num_workers=job.workers or 1)
    rows = energon.get_train_dataset(
        job.own, worker_config=config, batch_size=job.batch, task_encoder=Rows(),
        shuffle_buffer_size=BUFFER, max_samples_per_sequence=20,
    )  # fmt: skip
    loader = energon.get_savable_loader(rows)
    if job.states:
        loader.restore_state_rank(job.mine)
    return iter(loader), loader.save_state_rank


def cook(sample: dict[str, Any]) -> Any:
    from megatron import energon

    return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["txt"])


def main() -> None:
    """NAME FOLDER PART RANKS WORKERS BATCH STEPS, and RANK in the environment; -STEPS saves nothing."""
    name, folder, part, ranks, workers, batch, steps = sys.argv[1:]
    place, number, rank = Path(folder), int(part), int(os.environ["RANK"])
    own = place.parent / f"own-{name}"
    own.mkdir(exist_ok=True)
    import torch

    if int(ranks) > 1:
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    states = [
        pickle.loads(path.read_bytes()) for path in sorted(place.glob(f"{number - 1}-*.state"))
    ]
    out = place / f"{number}-{rank}"
    found: dict[str, Any] = {"before": [], "after": []}
    try:
        make = getattr(import_module("benchmarks.elastic_ranks"), name)
        batches, state = make(
            Job(place.parent / "rows", own, rank, int(ranks), int(workers), int(batch), states)
        )
        limit = int(steps)
        found["before"] = [list(map(int, rows)) for rows in islice(batches, abs(limit))]
        if limit > 0:
            out.with_suffix(".state").write_bytes(pickle.dumps(state()))
            left = ROWS // (int(batch) * int(ranks)) - limit if number == 0 else 0
            found["after"] = [list(map(int, rows)) for rows in islice(batches, left)]
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        found["error"] = ": ".join([type(error).__name__, *lines[-1:]])[:100]
    out.with_suffix(".json").write_text(json.dumps(found))
    sys.stderr.flush()
    if int(ranks) > 1:  # the first rank serves the others
        with suppress(Exception):
            torch.distributed.barrier()
    if name == "mosaic" and rank == 0:
        with suppress(Exception):
            import_module("streaming").base.util.clean_stale_shared_memory()
    os._exit(0)


if __name__ == "__main__":
    main()
