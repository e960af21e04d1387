"""Seeded bugs of bulks; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import Edit, Mutant

ENGINE = "tickwheel/engine/bulk.py"
RUNNER = "tickwheel/server/shard/bulk.py"
READS = "tickwheel/server/shard/reads.py"
READING = "tests/server/shard/test_bulk_reads.py::"
OPERATIONS = "tickwheel/server/shard/operations/bulk.py"
BULKS = "tests/server/shard/test_bulk.py::"
MODEL = (
    "tests/server/shard/test_bulk_model.py::test_a_bulk_is_a_loop_over_all_tasks[3-2-MemoryStore]"
)

BULK_MUTANTS = (
    Mutant(
        "a-bulk-whose-place-is-not-stored-with-its-step",
        "after a restart it does again what it had done",
        (
            Edit(
                ENGINE,
                "        self.known[row.bulk.id] = row\n"
                "        self._core.open.effects.put(BULK, row)\n",
                "        before = self.known.get(row.bulk.id, row)\n"
                "        self.known[row.bulk.id] = row\n"
                "        self._core.open.effects.put(BULK, before)\n",
            ),
        ),
        (
            BULKS + "test_it_goes_on_after_a_restart_where_it_was",
            MODEL,
        ),
    ),
    Mutant(
        "a-bulk-without-a-moment",
        "what is enqueued after it was made is changed, too",
        (
            Edit(
                RUNNER,
                'keys = [(task_id, "") for task_id in ids if task_id <= bulk.until_id]',
                'keys = [(task_id, "") for task_id in ids]',
            ),
        ),
        (BULKS + "test_what_is_enqueued_after_a_bulk_was_made_is_not_its_business",),
    ),
    Mutant(
        "the-moment-of-a-bulk-is-when-its-turn-comes",
        "what was sent behind it and came first is changed, too",
        (
            Edit(
                OPERATIONS,
                "                found = shard.border.act().bulks.make(wanted)\n",
                "                late = wanted._replace(until_id=shard.core.ids.last)\n"
                "                found = shard.border.act().bulks.make(late)\n",
            ),
        ),
        (BULKS + "test_what_is_enqueued_after_a_bulk_was_made_is_not_its_business",),
    ),
    Mutant(
        "the-moment-of-a-bulk-rests-on-the-wall-clock",
        "after a clock went back a letter that died later is requeued, or deleted, too",
        (
            Edit(
                RUNNER,
                "letter.behind_id >= bulk.until_id:\n",
                "letter.died_ms > bulk.made_ms:\n",
            ),
        ),
        (BULKS + "test_what_dies_after_a_bulk_was_made_is_not_its_business[3600000-False-delete]",),
    ),
    Mutant(
        "a-bulk-without-a-place-of-its-own",
        "what dies after it was made, before anything is enqueued, is its business, too",
        (
            Edit(
                OPERATIONS,
                "            until_id = core.ids.take(1, now.now_ms)\n",
                "            until_id = core.ids.last + 1\n",
            ),
        ),
        (BULKS + "test_what_dies_after_a_bulk_was_made_is_not_its_business[0-False-delete]",),
    ),
    Mutant(
        "a-bulk-that-skips-what-its-slice-had-no-time-for",
        "the rest of a slice that ended early is never looked at",
        (
            Edit(
                RUNNER,
                "        return seen.done\n\n    def _step",
                "        return len(keys)\n\n    def _step",
            ),
        ),
        (BULKS + "test_a_slice_ends_by_its_time_whatever_a_task_costs[47]",),
    ),
    Mutant(
        "a-slice-that-does-not-look-at-the-clock",
        "a dear condition holds the event loop",
        (
            Edit(
                RUNNER,
                "view([key[0] for key in keys]), time.monotonic() + SLICE_S\n",
                "view([key[0] for key in keys]), time.monotonic() + 60.0\n",
            ),
        ),
        (BULKS + "test_a_slice_ends_by_its_time_whatever_a_task_costs[47]",),
    ),
    Mutant(
        "a-cancelled-bulk-that-goes-on",
        "it changes more after it was ended",
        (
            Edit(
                RUNNER,
                "        return row is not None and not row.state.is_over\n",
                "        return row is not None\n",
            ),
        ),
        (BULKS + "test_one_that_is_cancelled_changes_nothing_more",),
    ),
    Mutant(
        "bulks-read-in-everybodys-places",
        "cancels, look-ups and loads of due tasks wait behind the reads of bulk operations",
        (
            Edit(
                READS,
                "        async with self._bulk_places:\n            yield self._read_for_bulk\n",
                "        async with self._places:\n            yield self._read_for_bulk\n",
            ),
        ),
        (
            READING + "test_nobody_waits_while_the_reads_of_many_bulk_hang[cancel]",
            READING + "test_what_bulk_read_has_few_places_and_few_bytes",
        ),
    ),
    Mutant(
        "a-bulk-that-keeps-its-place-while-it-waits",
        "bulk operations with a rate, or that wait for their commit, hold the others up",
        (
            Edit(
                RUNNER,
                "            while keys and work.is_wanted:\n                await work.paced()\n"
                "                done = await self._turn(work, selector, keys[:reach])\n",
                "            while keys and work.is_wanted:\n"
                "                async with self._runner.reader._bulk_places:\n"
                "                    await work.paced()\n"
                "                done = await self._turn(work, selector, keys[:reach])\n",
            ),
        ),
        (READING + "test_one_that_waits_for_its_rate_or_its_commit_holds_no_place",),
    ),
    Mutant(
        "each-read-of-a-bulk-takes-the-bytes-of-all",
        "bulk operations together have more rows in memory than they may",
        (
            Edit(
                READS,
                "self._read(ids, BULK_READ_BYTES_MAX // BULK_READS_MAX, bodies=bodies)\n",
                "self._read(ids, BULK_READ_BYTES_MAX, bodies=bodies)\n",
            ),
        ),
        (READING + "test_what_bulk_read_has_few_places_and_few_bytes",),
    ),
)
