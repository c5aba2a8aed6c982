"""What the stages of a pipeline will do, before anything is read. From the bottom up:

chain           which stage stands where
inputs          what a chain reads: source, blocks, schemas
first_rows      finds a schema
as_columns      turns Python objects into columns; the columns of a chain's rows
arrange         makes a chain of stages
layouts         how each epoch is cut
counts          how many batches there are, and where each begins
plan            the four parts together
migrate         adapts the state of a changed pipeline
"""
