"""What the stages of a pipeline will do, before anything is read. From the bottom up:

schemas         of rows that are Python objects
chain           which stage stands where
block_table     a source's blocks as arrays
first_rows      finds a schema
as_columns      turns Python objects into columns
arrange         makes a chain of stages
layouts         how each epoch is cut
counts          how many batches there are, and where each begins
plan            the four parts together
migrate         adapts the state of a changed pipeline
"""
