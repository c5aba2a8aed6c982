"""What is kept and written: files of rows, memory maps, the cache."""
