"""A program whose functions are called on a cluster of which nodes die and join, or whose head is lost. It
writes the numbers of the batches' rows, and how many nodes were at work.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import psutil
import ray
from ray.cluster_utils import Cluster

import trainpipes as tp


def slow(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.01)
    return {"x": row["x"], "pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}


def main(case: str, folder: str) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(cluster.address, log_to_driver=False, configure_logging=False)
    rows = (
        tp.list_files(f"{folder}/*.parquet").read_parquet().sharding_filter(8).shuffle(50, seed=3)
    )
    pipe = rows.map(slow, version="1").batch(16).collate()
    batches, seen = [], set()
    loader = tp.Loader(pipe, executor=tp.Ray(num_workers=2))
    for number, batch in enumerate(loader):
        batches.append(batch["x"].tolist())
        seen.update(batch["node"])
        if number == 3 and case == "nodes":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        if number == 6 and case == "nodes":
            cluster.add_node(num_cpus=1)
        if number == 3 and case == "head":
            for process in psutil.Process().children(recursive=True):
                if process.name() in ("gcs_server", "raylet"):
                    os.kill(process.pid, signal.SIGKILL)
    ray.shutdown()
    cluster.shutdown()
    Path(folder, "result.json").write_text(json.dumps([batches, len(seen)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
