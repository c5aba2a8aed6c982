"""What users iterate, with a state before and after every item.

session            where a pipeline or a Loader stands
pass_iterator      what users iterate
one_pass           one pass over a plan, and its state as a dict
pass_counter       which pass is at hand, agreed by processes that share a pipeline

consumer_iterator  the items of one worker of one rank, in the order of the global sequence
prefetcher         items taken ahead of use: batches on their way to a device, and which is the last
epoch_end_sync     how ranks end an uneven epoch at the same step
empty_epoch        a warning where an epoch gives nothing

loader_workers     the worker processes of a Loader, and what each of them iterates
worker_message     what it sends
worker_receiver    what all have sent, as the items of one consumer
worker_watch       notices at once that one has died, and ends them
worker_end         how a worker's process ends by itself, and with the one that trains
"""
