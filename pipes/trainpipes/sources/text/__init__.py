"""Files of text, in blocks of whole rows.

exact_integers  integers that floats would round
format          what a format tells of itself: where a row ends, and what a row is
json_depth      JSON that nests too deep
block_scan      cuts a file into pieces of whole rows, and gives these
row_errors      what is wrong with a row, with file and line
blocks          the pieces of a file as blocks of rows
text_reader     what the stages share: what they open, columns and types
read_csv        CSV
read_json       JSON
read_text       lines, paragraphs, documents
"""
