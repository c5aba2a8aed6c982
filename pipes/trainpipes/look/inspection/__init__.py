"""A look at files before training on them: ``inspect_files``, and ``trainpipes inspect`` in a shell.

inspection      what was found out, as plain values
given_files     which files are the data, and what lies beside them
part            a file: its rows, its blocks, and how to read some
parquet_files   what footers of Parquet say
text_head       the beginning of a large file of text
other_files     what files of other formats say
texts           texts and bytes in columns of any type
sample          some rows of all files
duplicates      how many rows are equal to another one
row_order       whether rows of one label stand together
cells           values in short, for people
lengths         how long rows are, in tokens or bytes
file_findings   what to know of files
row_findings    what to know of rows
as_text         all of it for a terminal
as_html         all of it for a notebook
inspect_files   the function
"""

from trainpipes.look.inspection.inspect_files import inspect_files
from trainpipes.look.inspection.inspection import Inspection

__all__ = ["Inspection", "inspect_files"]
