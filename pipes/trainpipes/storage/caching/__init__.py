"""What ``cache()`` keeps on disk, and how files of ours are written and read.

block_cache   the rows of each block, made once and kept
holes         rows that a filter below the cache dropped, where the dealing still counts them
cache_key     what names kept rows: the stages that made them, functions included
contents      what functions and objects do and hold, as a digest
used_names    the global names that a function uses
checked_file  Arrow files with a checksum, which are whole or taken for missing
private_file  files and locks of which their owner alone may write
"""
