"""The engine: a shard in memory. Commands and times go in; outcomes and effects come out."""
