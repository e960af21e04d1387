"""The pure core: wheel, groups, leases, retries, sessions, effects. See ``engine.py``."""
