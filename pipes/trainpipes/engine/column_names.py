"""Which columns rows have, before any is trained on."""

from __future__ import annotations

import pyarrow as pa

from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.planning.as_columns import known_columns
from trainpipes.engine.planning.first_rows import first_rows
from trainpipes.engine.planning.plan import Plan

__all__ = ["column_names", "row_schema"]


def column_names(plan: Plan) -> list[str]:
    """Names of the columns of a pipeline's rows, before they are batched; none where rows have no names, or
    where there is no row."""
    data = _schema_or_rows(plan, "column_names")
    if isinstance(data, pa.Schema):
        return list(data.names)
    if isinstance(data, TensorRows):
        return list(data.names or ())
    if data and isinstance(data[0], dict):
        return [name for name in data[0] if isinstance(name, str)]
    return []


def row_schema(plan: Plan, asker: str) -> pa.Schema | None:
    """The schema of a pipeline's rows, before they are batched; None where they are Python objects, or where
    there is no row.

    Args:
        plan: the pipeline's.
        asker: who asks, for messages.
    """
    data = _schema_or_rows(plan, asker)
    return data if isinstance(data, pa.Schema) else None


def _schema_or_rows(plan: Plan, asker: str) -> pa.Schema | Payload | None:
    """The schema of rows that have one; else the first of them."""
    chain = plan.chain
    steps = chain.before + chain.after_on_rows
    schema = known_columns(plan.inputs, steps)
    if schema is not None:
        return schema
    data = first_rows(plan.inputs, steps, asker)
    return data.schema if isinstance(data, pa.Table) else data
