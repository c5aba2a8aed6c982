"""The engine: runs a chain of stages. From the bottom up:

calling            stages, one after the other, and user functions in threads and processes
planning           what a chain will do; nothing is read but first rows, for types
reading            the rows of an epoch, shared by its shards
shards             the items of one consumer's shards, in order
iterating          what users iterate, with a state
record             a chain as a value, and where it stands
"""
