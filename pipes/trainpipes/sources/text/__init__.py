"""Files of text, in blocks of whole rows.

exact_integers  integers that floats would round
format          what a format tells of itself: where a row ends, and what a row is
block_scan      cuts a file into pieces of whole rows
row_errors      what is wrong with a row, with file and line
lines           lines, paragraphs, documents
json_depth      JSON that nests too deep
json_rows       JSON
csv_rows        CSV
blocks          the pieces of a file as blocks of rows
block_schema    columns and types
text_reader     what the stages share, and open
read_csv        the stage for CSV
read_json       the stage for JSON
read_text       the stage for text
"""
