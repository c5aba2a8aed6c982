"""What an epoch will be, without iterating it.

estimate       about how many items it has
names          which columns its rows have
padding_share  about how much of them is padding
shares         who of many ranks and workers gets what
"""
