"""Bugs seeded on purpose, each of which must make a named test fail."""
