"""Values in Arrow columns: their types, and those of Python, NumPy and torch as Arrow's.

fixed_lists   columns whose rows are arrays of one shape
row_types     the Arrow types of Python values
value_column  Python values as an Arrow array of a type
row_schema    rows of Python objects as columns of one schema
content       digests of tables and tensors
content_hash  rows by their content, as numbers
gathered      rows by their numbers, of types that Arrow cannot gather too
utf8          text that is not UTF-8
"""
