"""What users iterate, with a state before and after every item.

session            where a pipeline or a Loader stands
epoch_iterator     what users iterate
one_pass           one pass over a plan, and its state as a dict
epoch_counter      which pass is at hand, agreed by processes that share a pipeline

worker_iterator    the items of one worker of one rank, in the order of the global sequence
lookahead          items taken ahead of use: on their way to a device, or for ranks to agree on
agreement          how ranks agree where an uneven epoch ends

loader_workers     the worker processes of a Loader, and what each of them iterates
worker_message     what it sends
worker_receiver    what all have sent, as the items of one consumer
worker_end         how a worker's process ends: by itself, with the one that trains, or where another has died
"""
