"""Files of text, in blocks of whole rows.

exact_integers  integers that floats would round
format          what a format tells of itself: where a row ends, and what a row is
block_scan      cuts a file into pieces of whole rows
block_index     the blocks of all files
row_errors      what is wrong with a row, with file and line
lines           lines, paragraphs, documents
json_depth      JSON that nests too deep
json_rows       JSON
csv_rows        CSV
piece_reader    reads pieces, and parses them
block_schema    columns and types
block_reader    rows of blocks in order
blocks          the rows of all files: what the stages open
text_reader     what the stages share
read_csv        the stage for CSV
read_json       the stage for JSON
read_text       the stage for text
"""
