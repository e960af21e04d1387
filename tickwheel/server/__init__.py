"""The imperative shell around the engine: sockets, clocks, commits. See ``daemon.py``."""
