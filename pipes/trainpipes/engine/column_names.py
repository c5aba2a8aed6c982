"""The columns of a pipeline's rows, before they are batched."""

from __future__ import annotations

import pyarrow as pa

from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.planning.as_columns import known_columns
from trainpipes.engine.planning.first_rows import first_rows
from trainpipes.engine.planning.plan import Plan


def columns(plan: Plan) -> dict[str, str]:
    data = _schema_or_rows(plan, "explain().columns")
    if isinstance(data, pa.Schema):
        return _types(data)
    if isinstance(data, TensorRows):
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in data.tensors]
        return dict(zip(data.names or (), dtypes, strict=False))
    if data and isinstance(data[0], dict):
        return {k: type(v).__name__ for k, v in data[0].items() if isinstance(k, str)}
    return {}


def columns_if_known(plan: Plan) -> dict[str, str]:
    schema = known_columns(plan.inputs, plan.chain.before + plan.chain.after_on_rows)
    return {} if schema is None else _types(schema)


def _types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def row_schema(plan: Plan, asker: str) -> pa.Schema | None:
    data = _schema_or_rows(plan, asker)
    return data if isinstance(data, pa.Schema) else None


def _schema_or_rows(plan: Plan, asker: str) -> pa.Schema | Payload | None:
    chain = plan.chain
    steps = chain.before + chain.after_on_rows
    schema = known_columns(plan.inputs, steps)
    if schema is not None:
        return schema
    data = first_rows(plan.inputs, steps, asker)
    return data.schema if isinstance(data, pa.Table) else data
