"""Rows of several pipelines as those of one.

row_kinds       kinds of rows
common_columns  what rows of several pipelines become
joined_input    one of several pipelines
concat          one after the other
zip             side by side
"""
