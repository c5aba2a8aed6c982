"""The runs of one shard, made in order.

chains      its stages: those that must see runs in order, and those that finish them in any thread
making      its runs, epoch after epoch
lane        one item at a time, and its cursor
beforehand  the next items, made while somebody is at work
"""
