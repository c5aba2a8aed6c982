"""What a stage and a source are: what the engine asks of them, and they of it.

options            options of stages: compared, shown, known by a state
stage              what a stage is: a record of its options
source             what is needed of the place rows come from
blame              which row an error is about
global_draws       functions that draw from a global generator
empty_epoch_guard  epochs under repeat() that give nothing
stage_kinds        the kinds of stages, and what is asked of each
"""
