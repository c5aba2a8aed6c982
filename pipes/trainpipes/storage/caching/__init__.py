"""What ``cache()`` keeps on disk, and how files of ours are written and read."""
