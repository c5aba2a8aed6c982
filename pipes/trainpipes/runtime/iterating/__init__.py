"""What users iterate, with a state before and after every item.

consumer    one worker of one rank: its shards in the order of the global sequence
one_pass    one pass over a plan
runner      where a pipeline or a Loader stands
iterator    what users iterate
node        a stage as a torchdata node
foreign     rows from a torchdata node that is not ours
plain       states of such nodes as JSON types
one_at_a_time  an iterator is one thread's
passes      which pass is at hand, agreed by processes that share a pipeline
delayed     what a consumer gives, later
agreement   how ranks end an uneven epoch at the same step
ahead       batches on their way to a device
rounds      how the workers of a Loader send what they make
rounded     what they make, dealt in order
parcels     several batches as one message
worker_end  how a worker's process ends
"""
