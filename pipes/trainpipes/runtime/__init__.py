"""How a chain of stages is run, from the bottom up.

block, run      rows that travel together; a run of items with the position after each
source          what is needed of the place rows come from
stage           the one class that every stage is
arrange, plan   from a chain of stages to what will happen
windows, feed   rows of an epoch: read, ordered, dealt to one shard
drought         epochs under repeat() that give nothing
lane            one shard: its chain, epoch after epoch
consumer        one worker of one rank: its lanes in the order of the global sequence
iterator, node  what users iterate, with a state before and after every item
passes          which epoch is at hand, agreed by processes that share a pipeline
rounds          how the workers of a Loader send what they make
agreement       how ranks end an uneven epoch at the same step
change          a state of another batch size made one of the pipeline at hand
"""
