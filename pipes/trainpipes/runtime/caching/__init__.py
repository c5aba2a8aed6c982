"""What a cache() keeps.

cached      of each block, once, on disk
holes       the places of rows that are not kept
address     what an entry is known by
contents    what functions and objects do and hold
used_names  the names that functions use
sealed      how an entry is written and checked
own_file    files that only their owner may write
file_lock   how processes keep out of each other's way
"""
