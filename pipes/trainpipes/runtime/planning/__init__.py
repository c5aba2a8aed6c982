"""From a chain of stages to what will happen, before anything is read.

arrange  which stage stands where
cut      how an epoch is cut into spans, windows, micro-batches
counted  how many micro-batches there are, and where each begins
plan     all of that, what reads the windows, and what a state must agree with
change   a state of another batch size or pack length made one of the pipeline at hand
remix    a state of a mix with other sources or weights
"""
