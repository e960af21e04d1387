"""The imperative shard around the engine: sockets, clocks, commits. See ``daemon.py``."""
