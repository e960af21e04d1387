"""One shard at work: engine, committer, reads, and what is done beside them."""
