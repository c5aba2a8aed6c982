"""The rows of an epoch, read once in a process and shared by its shards."""
