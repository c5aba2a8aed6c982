"""Arrow tables, in memory and in files.

from_arrow     the stage for a table in memory
layout         record batches of a file
saved_dataset  folders of save_to_disk
read_arrow     files
"""
