"""What users iterate, with a state before and after every item.

iteration_state    where a pipeline or a Loader stands
epoch_iterator     what users iterate
one_pass           one pass over a plan, and its state
epoch_counter      which pass is next, agreed by processes that share a pipeline
worker_iterator    the items of one worker of one rank, in global order
lookahead          items taken ahead of use, and how ranks agree where an uneven epoch ends
loader_workers     the worker processes of a Loader, and what they have sent, as one consumer's items
worker_message     what a worker sends
worker_end         how a worker's process ends
"""
