"""How a chain of stages is run. What all have in common, and then room by room from the bottom up.

block, run   rows that travel together; a run of items with the position after each
source       what is needed of the place rows come from
stage        the one class that every stage is
progress     a line that says how far a long job is

rows         rows in memory, and in other forms
planning     from a chain of stages to what will happen, before anything is read
reading      the rows of an epoch, read once in a process and shared by its shards
caching      what a cache() keeps
shards       the runs of one shard, made in order
iterating    what users iterate, with a state before and after every item
calling      functions of the user's, called for rows
mixing       rows of several pipelines, side by side
"""
