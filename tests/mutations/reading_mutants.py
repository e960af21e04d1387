"""Seeded bugs of reading beside commits, and of rows that are missing."""

from __future__ import annotations

from mutations.mutants import CONNECTION, Edit, Mutant

SQLITE_READER = "tickwheel/persistence/sqlite/reader.py"
READS = "tickwheel/server/shard/reads.py"
MISSING = "tests/server/shard/test_missing_rows.py::"
READER = "tests/server/shard/test_reader.py::"
TCP = "tickwheel/server/tcp/connection.py"
SHARES = "tests/server/tcp/test_turns.py::"
RACES = "tests/persistence/test_races.py::test_reads_beside_commits_see_whole_batches"

READING_MUTANTS = (
    Mutant(
        "packs-read-by-a-statement-of-their-own",
        "a task that moves from its pack to a row between the two statements is in neither",
        (
            Edit(
                SQLITE_READER,
                "        rows, large = self._tasks(*columns[:6])\n",
                "        cursor = self._connection.execute(self._read, (str(list(ids)),))\n"
                "        more = cursor.fetchone()\n"
                "        columns = (*columns[:_ROW_COLUMNS], *more[_ROW_COLUMNS:])\n"
                "        rows, large = self._tasks(*columns[:6])\n",
            ),
        ),
        (RACES + "[sqlite]",),
    ),
    Mutant(
        "what-became-of-a-group-that-is-gone-is-not-read",
        "a task is looked at with a dead letter of a group that was deleted during the read",
        (
            Edit(
                READS,
                "{**self._groups_of(known.row.topic), **known.progress, **known.dead}",
                "self._groups_of(known.row.topic)",
            ),
        ),
        (READER + "test_what_is_recorded_of_a_group_shows_whatever_has_become_of_the_group",),
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
    Mutant(
        "a-missing-row-is-taken-for-gone-when-due",
        "a task that came due and whose row was not found loses its place",
        (
            Edit(
                "tickwheel/engine/firing.py",
                "            if row is None:\n                continue\n            due_ms =",
                "            if row is None:\n                core.firing.pop(task_id, None)\n"
                "                continue\n            due_ms =",
            ),
        ),
        (MISSING + "test_when_it_comes_due",),
    ),
    Mutant(
        "a-missing-row-is-taken-for-gone-when-its-turn-comes",
        "a ready task whose row was not found loses its place",
        (
            Edit(
                "tickwheel/engine/delivery.py",
                "            if row is None or task_id in coming or group.loading.pop("
                "task_id, None) is None:\n",
                "            if group.loading.pop(task_id, None) is None or row is None:\n",
            ),
        ),
        (MISSING + "test_when_its_turn_comes",),
    ),
    Mutant(
        "a-missing-row-is-answered-as-gone",
        "cancel and look-up of a task whose row is missing say that it has left",
        (
            Edit(
                "tickwheel/server/shard/reads.py",
                "        if missing:\n",
                "        if missing and not ids:\n",
            ),
        ),
        (MISSING + "test_when_it_comes_due", MISSING + "test_when_it_is_in_flight"),
    ),
    Mutant(
        "a-missing-row-is-not-read-again",
        "the first answer of the store is believed",
        (
            Edit(
                "tickwheel/server/shard/reads.py",
                "        while absent and turn <= READS_AGAIN_MAX:\n",
                "        while absent and turn < 0:\n",
            ),
        ),
        (READER + "test_a_row_that_memory_holds_is_read_again",),
    ),
    Mutant(
        "columns-show-what-has-ended",
        "a task that was cancelled a moment ago is moved as if it were there",
        (
            Edit(
                "tickwheel/server/shard/reads.py",
                "            changed |= plain.keys() & effects.ended.keys()\n",
                "",
            ),
        ),
        (READER + "test_columns_have_only_tasks_of_which_nothing_else_is_recorded",),
    ),
    Mutant(
        "a-piece-of-frames-in-one-go",
        "tens of thousands of small frames that come together hold up everybody",
        (
            Edit(
                TCP,
                "                if self.must_wait or turns.is_over(used):\n",
                "                if self.must_wait:\n",
            ),
        ),
        (SHARES + "test_a_piece_of_many_frames_is_looked_at_a_share_at_a_time[1-lists]",),
    ),
    Mutant(
        "each-connection-has-the-whole-turn",
        "many connections that send many frames hold up everybody together",
        (
            Edit(
                "tickwheel/server/tcp/turns.py",
                "return self._left <= 0 or (used >= STEPS_AT_A_TIME and bool(self._waiting))\n",
                "return used >= STEPS_PER_TURN\n",
            ),
        ),
        (SHARES + "test_a_piece_of_many_frames_is_looked_at_a_share_at_a_time[5-lists]",),
    ),
    Mutant(
        "what-is-left-is-offered-again-and-again",
        "enqueues beyond the window are looked at as often as there are of them",
        (
            Edit(
                TCP,
                "                run = PLAIN_RUN_MIN\n",
                "                run = count\n",
            ),
        ),
        (SHARES + "test_a_piece_of_many_frames_is_looked_at_a_share_at_a_time[1-enqueues]",),
    ),
)
