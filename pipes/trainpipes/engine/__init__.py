"""The engine: runs a chain of stages. From the bottom up:

layout             which rows are in which batch, by arithmetic
permutation        a random order, computed for any position
topology           ranks, workers and shards
interrupts         waits that Ctrl-C ends
pool               threads that work ahead
calling            user functions, in threads and processes
reading            the rows of an epoch, shared by its shards
planning           what a chain will do, before anything is read
shards             the items of one consumer's shards, in order
iterating          what users iterate, with a state
"""
