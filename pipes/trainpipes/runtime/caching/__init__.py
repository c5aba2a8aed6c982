"""What a cache() keeps.

cached     of each block, once, on disk
holes      the places of rows that are not kept
address    what an entry is known by
sealed     how it is written and checked
file_lock  how processes keep out of each other's way
"""
