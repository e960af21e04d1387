"""Seeded bugs of reading beside commits, and of rows that are missing."""

from __future__ import annotations

from mutations.mutants import CONNECTION, Edit, Mutant

SQLITE_READER = "tickwheel/persistence/sqlite/reader.py"
RACES = "tests/store/test_races.py::test_reads_beside_commits_see_whole_batches"

READING_MUTANTS = (
    Mutant(
        "packs-read-by-a-statement-of-their-own",
        "a task that moves from its pack to a row between the two statements is in neither",
        (
            Edit(
                SQLITE_READER,
                "        columns = cursor.fetchone()\n",
                "        columns = cursor.fetchone()\n"
                "        more = self._connection.execute(self._read, (str(list(ids)),)).fetchone()\n"
                "        columns = (*columns[:_ROW_COLUMNS], *more[_ROW_COLUMNS:])\n",
            ),
        ),
        (RACES + "[sqlite]",),
    ),
    Mutant(
        "reads-without-their-snapshot",
        "each statement of a listing sees another moment",
        (
            Edit(
                CONNECTION,
                '    connection.execute("BEGIN")\n    try:\n        yield',
                "    try:\n        yield",
            ),
        ),
        (RACES + "[sqlite]",),
    ),
    Mutant(
        "redis-scans-beside-commits",
        "a page of several scripts does not hold commits up",
        (
            Edit(
                "tickwheel/persistence/redis/reader.py",
                "        async with self._writer.lock:\n            yield",
                "        yield",
            ),
        ),
        (RACES + "[redis]",),
    ),
)
