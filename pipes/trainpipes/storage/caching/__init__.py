"""What ``cache()`` keeps on disk, and how files of ours are written and read.

block_cache   the rows of each block, made once and kept
contents      what functions and objects do and hold, as a digest
checked_file  Arrow files with a checksum, which are whole or taken for missing
private_file  files and locks of which their owner alone may write
"""
