"""The engine: how a chain of stages is run, room by room from the bottom up.

interrupts         waits that Ctrl-C ends
pool               a few threads that work ahead

reading            the rows of an epoch, read once in a process and shared by its shards
planning           from a chain of stages to what will happen, before anything is read
shards             the items of one consumer's shards, made in order
iterating          what users iterate, with a state before and after every item
"""
