"""The daemon around the engine: sockets, clocks, commits. See ``daemon.py``."""
