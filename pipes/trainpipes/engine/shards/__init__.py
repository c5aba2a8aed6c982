"""The items of a consumer's shards, made in order."""
