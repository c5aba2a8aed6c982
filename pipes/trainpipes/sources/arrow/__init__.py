"""Arrow tables, in memory and in files.

from_arrow     the stage for a table in memory
layout         where the record batches of a file lie
saved_dataset  folders of save_to_disk
read_arrow     the stage for files, and the format
"""
