"""Calls stages for a shard's rows, and user functions: several at a time, in threads and in processes."""
