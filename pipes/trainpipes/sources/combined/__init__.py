"""Rows of several pipelines as those of one.

row_kinds       of what kind a pipeline's rows are
common_columns  what rows of several pipelines become, so that they go together
joined_input    one of several pipelines whose rows are read as those of one source
concat          one after the other
zip             side by side
"""
