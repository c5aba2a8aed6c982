"""From the stages of a pipeline to what will happen, before anything is read. From the ground up:

schemas         of rows that are Python objects: given, or found
chain           which stage stands where
block_table     a source's blocks as arrays, in an epoch's order
first_rows      finds a schema
as_columns      the stage that turns Python objects into columns
arrange         makes a chain of stages as they are written
layouts         how each epoch is cut into spans, windows, batches
counts          how many batches there are, and where each begins
plan            the four parts together, and what a state must agree with
migrate         a state of a pipeline that differed in what may change, made one of the plan at hand
"""
