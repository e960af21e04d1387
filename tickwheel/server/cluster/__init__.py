"""Who leads a shard: the lease, and taking over."""
