"""Rows in memory, and in other forms.

block         rows that travel together, and who each of them is
payload       what rows are made of: a table, tensors, or Python objects
tensor_rows   rows of several tensors
joined        tables joined as they come
lazy_batches  items of a run that are made when somebody takes them
lone_copy     copies by the thread that asks
columns       rows as columns of Python, NumPy or torch
fixed_lists   columns whose rows are arrays of one shape
row_schema    rows of Python objects as Arrow columns of one schema
value_column  Python values as an Arrow array of a type
row_types     the Arrow types of Python values
utf8          text that is not UTF-8
content       digests of tables and tensors
bad_cell      a value in a column that a stage cannot use
"""
