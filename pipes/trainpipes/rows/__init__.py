"""Rows in memory, and in other forms.

block         rows that travel together, and who each of them is
pieces        what packed rows are made of
payload       what rows are made of: a table, tensors, or Python objects
tensor_rows   rows of several tensors
joined        tables joined as they come
lazy_batches  items of a run that are made when somebody takes them
lone_copy     copies by the thread that asks
columns       rows as columns of Python, NumPy or torch
bad_text      the row whose text is not UTF-8, named
bad_cell      a value in a column that a stage cannot use
run           items on their way through a chain, with the position after each
"""
