"""Which columns rows have, before any is trained on."""

from __future__ import annotations

import pyarrow as pa

from trainpipes.runtime.planning.as_columns import known_columns
from trainpipes.runtime.planning.first_rows import first_rows
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.rows.tensor_rows import TensorRows

__all__ = ["column_names"]


def column_names(plan: Plan) -> list[str]:
    """Names of the columns of a pipeline's rows, before they are batched; none where rows have no names, or
    where there is no row."""
    chain = plan.chain
    steps = chain.before + chain.after_on_rows
    schema = known_columns(plan.inputs, steps)
    if schema is not None:
        return list(schema.names)
    data = first_rows(plan.inputs, steps, "column_names")
    if isinstance(data, pa.Table):
        return list(data.column_names)
    if isinstance(data, TensorRows):
        return list(data.names or ())
    if data and isinstance(data[0], dict):
        return [name for name in data[0] if isinstance(name, str)]
    return []
