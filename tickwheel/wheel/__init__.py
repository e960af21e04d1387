"""The hashed timing wheel, which knows only ids and due times. See ``timing.py``."""
