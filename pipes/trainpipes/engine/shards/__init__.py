"""The items of one consumer's shards, made in order."""
