"""The engine: runs a chain of stages. From the bottom up:

calling            user functions, in threads and processes
planning           what a chain will do, before anything is read
reading            the rows of an epoch, shared by its shards
shards             the items of one consumer's shards, in order
iterating          what users iterate, with a state
"""
