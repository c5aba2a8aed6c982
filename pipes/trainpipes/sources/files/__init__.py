"""Which files there are, and what all formats need of them.

patterns        which files a folder or a pattern stands for
folders         what is in folders, here and in stores
listing         what a path, a folder, a glob or a URL stands for
file_errors     what is said of a file that cannot be read
range_file      bytes of a file as a file that Arrow reads
file_bytes      the bytes of a file, here or on another machine
cached_bytes    bytes of remote files, kept on a disk of this machine
list_files      the stage: the files of a data set, in order
file_rows       rows of files in blocks: what is the same for all formats
each_file       something done with each file, and what is said of those that fail
format          what a file format tells of itself
index_store     what was found in files, kept for later runs
schema          one schema for the rows of many files
block_reader    rows of blocks in order, of any format
file_source     the rows of all files, of any format
file_reader     what all stages that read files share
row_names       which file each row is from
"""
