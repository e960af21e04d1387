"""A running shard: engine, committer, reads, operations and background work."""
