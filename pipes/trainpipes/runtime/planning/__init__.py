"""From a chain of stages to what will happen, before anything is read.

arrange  which stage stands where
plan     how the epoch is cut, and each shard's chain put together
change   a state of another batch size or pack length made one of the pipeline at hand
remix    a state of a mix with other sources or weights
"""
