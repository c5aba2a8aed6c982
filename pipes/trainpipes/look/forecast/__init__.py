"""What an epoch will be, without iterating it.

estimate       about how many items it has
mixture_shares which source the rows of a mix are from
names          which columns its rows have
packed_rows    what packed rows hold
padding_share  about how much of them is padding
shares         who of many ranks and workers gets what
"""
