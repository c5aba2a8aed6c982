"""How a chain of stages is run, from the bottom up.

block, run      rows that travel together; a run of items with the position after each
source          what is needed of the place rows come from
stage           the one class that every stage is
arrange, plan   from a chain of stages to what will happen
cached, holes   what a cache() keeps of each block, and the places of rows that it does not
address         what is kept is known by; sealed, file_lock: how it is kept
block_table     a source's blocks as arrays, in an epoch's order
windows         rows of an epoch: read, ordered, shared; stream_windows, numbered: of other sources
waiting, feed   the rows of one shard, which may be settled before they are read
chains          the stages above them: in order, or in any thread
making, lane    one shard: its runs, epoch after epoch; one item at a time, and its cursor
mixture, mix_…  rows of several pipelines: one source of many; mixed_ids: who their rows are
drought         epochs under repeat() that give nothing
pool            threads that work ahead
row_random      a generator for each row; row_call: a user's function as it is called for rows
hands           who calls one for several rows at a time: threads, or
crew            worker processes; crew_member: what one does; crew_order, passage: how rows get there
consumer        one worker of one rank: its lanes in the order of the global sequence
iterator, node  what users iterate, with a state before and after every item
passes          which epoch is at hand, agreed by processes that share a pipeline
rounds          how the workers of a Loader send what they make, in parcels
random_access   sources whose rows can be had by number
lone_copy       copies by the thread that asks; arrow_rows, columns: rows in other forms
ahead           batches on their way to a device, with the state of what was given
agreement       how ranks end an uneven epoch at the same step
remix           a state of a mix with other sources or weights
change          a state of another batch size made one of the pipeline at hand
estimate        about how many items an epoch has; padding_share: how much of them is padding
"""
