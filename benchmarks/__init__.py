"""Benchmarks of the daemon, beside its peers in the same run: ``python -m benchmarks --help``.

Not part of the package that is installed. Load comes from processes of its own and is encoded
before the clock starts; see ``docs/benchmarks.md`` for the method.
"""
