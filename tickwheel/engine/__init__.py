"""The engine: a shard in memory. It takes commands and times, and returns outcomes and effects."""
