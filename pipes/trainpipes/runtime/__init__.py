"""How a chain of stages is run: what all have in common, then room by room from the bottom up.

interrupts         waits that Ctrl-C ends
pool               a few threads that work ahead
empty_epoch_guard  epochs under repeat() that give nothing
warn_once          warnings that a process gives once
made_once          what a stage makes of its options, once in each process

rows               rows in memory, and in other forms

run                items on their way through a chain, with the position after each
source             what is needed of the place rows come from
own_class          what a class of stages of the user's own must not be
options            options of stages: compared, shown, known by a state
stage              what a stage is: a record of its options
blame              which row an error is about
kinds              the kinds of stages, and what is asked of each

calling            functions of the user's, called for rows
caching            what a cache() keeps
reading            the rows of an epoch, read once in a process and shared by its shards
planning           from a chain of stages to what will happen, before anything is read
shards             the items of one consumer's shards, made in order
iterating          what users iterate, with a state before and after every item
"""
