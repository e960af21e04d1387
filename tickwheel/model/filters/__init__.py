"""Filters of groups: `filter.py` is the surface; `parsing.py` reads, `conditions.py` judges."""
