"""The engine: runs a chain of stages. From the bottom up:

calling            stages in turn, and user functions in threads and processes
planning           the plan of a chain; nothing is read but first rows, for types
reading            the rows of an epoch, shared by its shards
shards             the items of a consumer's shards, in order
iterating          iterators of users, with a state
record             a chain as a value, and where it stands
"""
