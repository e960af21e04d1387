"""The hashed timing wheel alone: when which id is due. See ``timing.py``."""
