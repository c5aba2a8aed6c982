"""Files of text, in blocks of whole rows.

exact_integers  integers that floats would round
format          where rows end, and what they are
json_depth      JSON that nests too deep
block_scan      pieces of whole rows
row_errors      what is wrong with a row
blocks          pieces as blocks of rows
text_reader     columns and types
read_csv        CSV
read_json       JSON
read_text       lines, paragraphs, documents
"""
