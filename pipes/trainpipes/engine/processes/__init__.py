"""Worker processes that call functions for one process, which reads, orders and batches."""
