"""Calls that a type checker accepts, and calls that it must refuse: an ignore that is not needed is an error.

Nothing here is run.
"""

import pyarrow as pa

import trainpipes as tp

pipe = tp.list_files("data/*.parquet").read_parquet(["text"]).sharding_filter(24)
pipe = pipe.shuffle(40_960, seed=1, scope="buffer").map(len, num_workers=2, method="process")
pipe = pipe.batch(32, drop_last=True).pad_collate(max_length=512, padding_side="left").pin()
pipe = tp.Pipeline.shuffle(pipe, 9, seed=2)

pipe = tp.read_json("a.jsonl", ["text"], infer="all", block_rows=100).batch(4)
tp.list_files("a.csv").read_jsonl()  # type: ignore[attr-defined]

pipe.shuffle(seeds=1)  # type: ignore[call-arg]
pipe.shuffle("many")  # type: ignore[arg-type]
pipe.shuffle(scope="everything")  # type: ignore[arg-type]
pipe.map()  # type: ignore[call-arg]
pipe.batch(32, True)  # type: ignore[call-arg]
tp.read_json("a", infer="some")  # type: ignore[arg-type]
tp.read_text()  # type: ignore[call-arg]
tp.list_files("a").read_csv(seperator=";")  # type: ignore[call-arg]
tp.list_files("a", suffixes=".pq")  # type: ignore[call-arg]
tp.Pipeline([pipe])  # type: ignore[list-item]


class Scale(tp.TableStage):
    column: str
    by: float = 2.0

    def apply(self, table: pa.Table) -> pa.Table:
        return table


pipe.then(Scale("x", by=3.0)).repeat().then(Scale)  # type: ignore[arg-type]
Scale(by=3.0)  # type: ignore[call-arg]
Scale("x", by="3")  # type: ignore[arg-type]
Scale("x").by = 3.0  # type: ignore[misc]
