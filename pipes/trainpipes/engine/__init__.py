"""The engine: how a chain of stages is run, room by room from the bottom up.

layout             which rows are in which batch, by arithmetic
permutation        a random order of numbers, computed for any of them
topology           ranks, workers and shards
interrupts         waits that Ctrl-C ends
pool               a few threads that work ahead
calling            functions of users, in threads and processes

reading            the rows of an epoch, read once in a process and shared by its shards
planning           from a chain of stages to what will happen, before anything is read
shards             the items of one consumer's shards, made in order
column_names       which columns the rows of a chain have
iterating          what users iterate, with a state before and after every item
"""
