"""Rows in memory, and in other forms.

block         rows that travel together
late_items    items of a run that are made when somebody takes them
lone_copy     copies by the thread that asks
columns       rows as columns of Python, NumPy or torch
arrow_rows    rows of Python objects as Arrow
content       digests of tables and tensors
same_columns  rows of several sources that must have the same columns
side_by_side  rows of several sources with the columns of all
joined        tables joined
"""
