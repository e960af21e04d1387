"""Seeded bugs of jobs; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import Edit, Mutant

ENGINE = "tickwheel/engine/jobs.py"
RUNNER = "tickwheel/server/shard/jobs.py"
READS = "tickwheel/server/shard/reads.py"
READING = "tests/server/shard/test_job_reads.py::"
OPERATIONS = "tickwheel/server/shard/operations/jobs.py"
JOBS = "tests/server/shard/test_jobs.py::"
MODEL = (
    "tests/server/shard/test_jobs_model.py::test_a_job_is_a_loop_over_all_tasks[3-2-MemoryStore]"
)

JOB_MUTANTS = (
    Mutant(
        "a-job-whose-place-is-not-stored-with-its-step",
        "after a restart it does again what it had done",
        (
            Edit(
                ENGINE,
                "        self.known[row.job.id] = self._core.open.effects.jobs[row.job.id] = row\n",
                "        before = self.known.get(row.job.id, row)\n"
                "        self.known[row.job.id] = row\n"
                "        self._core.open.effects.jobs[row.job.id] = before\n",
            ),
        ),
        (
            JOBS + "test_it_goes_on_after_a_restart_where_it_was",
            MODEL,
        ),
    ),
    Mutant(
        "a-job-without-a-moment",
        "what is enqueued after it was made is changed, too",
        (
            Edit(
                RUNNER,
                'keys = [(task_id, "") for task_id in ids if task_id <= job.until_id]',
                'keys = [(task_id, "") for task_id in ids]',
            ),
        ),
        (JOBS + "test_what_is_enqueued_after_a_job_was_made_is_not_its_business",),
    ),
    Mutant(
        "the-moment-of-a-job-is-when-its-turn-comes",
        "what was sent behind it and came first is changed, too",
        (
            Edit(
                OPERATIONS,
                "                found = shard.border.act().jobs.make(wanted)\n",
                "                late = wanted._replace(until_id=shard.core.ids.last)\n"
                "                found = shard.border.act().jobs.make(late)\n",
            ),
        ),
        (JOBS + "test_what_is_enqueued_after_a_job_was_made_is_not_its_business",),
    ),
    Mutant(
        "the-moment-of-a-job-rests-on-the-wall-clock",
        "after a clock went back a letter that died later is requeued, or deleted, too",
        (
            Edit(
                RUNNER,
                "letter.behind_id >= job.until_id:\n",
                "letter.died_ms > job.made_ms:\n",
            ),
        ),
        (JOBS + "test_what_dies_after_a_job_was_made_is_not_its_business[3600000-False-delete]",),
    ),
    Mutant(
        "a-job-without-a-place-of-its-own",
        "what dies after it was made, before anything is enqueued, is its business, too",
        (
            Edit(
                OPERATIONS,
                "            until_id = core.ids.take(1, now.now_ms)\n",
                "            until_id = core.ids.last + 1\n",
            ),
        ),
        (JOBS + "test_what_dies_after_a_job_was_made_is_not_its_business[0-False-delete]",),
    ),
    Mutant(
        "a-job-that-skips-what-its-slice-had-no-time-for",
        "the rest of a slice that ended early is never looked at",
        (
            Edit(
                RUNNER,
                "        return seen.done\n\n    def _step",
                "        return len(keys)\n\n    def _step",
            ),
        ),
        (JOBS + "test_a_slice_ends_by_its_time_whatever_a_task_costs[47]",),
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
        (JOBS + "test_a_slice_ends_by_its_time_whatever_a_task_costs[47]",),
    ),
    Mutant(
        "a-cancelled-job-that-goes-on",
        "it changes more after it was ended",
        (
            Edit(
                RUNNER,
                "        return row is not None and not row.state.is_over\n",
                "        return row is not None\n",
            ),
        ),
        (JOBS + "test_one_that_is_cancelled_changes_nothing_more",),
    ),
    Mutant(
        "jobs-read-in-everybodys-places",
        "cancels, look-ups and loads of due tasks wait behind the reads of jobs",
        (
            Edit(
                READS,
                "        async with self._job_places:\n            yield self._read_for_job\n",
                "        async with self._places:\n            yield self._read_for_job\n",
            ),
        ),
        (
            READING + "test_nobody_waits_while_the_reads_of_many_jobs_hang[cancel]",
            READING + "test_what_jobs_read_has_few_places_and_few_bytes",
        ),
    ),
    Mutant(
        "a-job-that-keeps-its-place-while-it-waits",
        "jobs with a rate, or that wait for their commit, hold the others up",
        (
            Edit(
                RUNNER,
                "            while keys and work.is_wanted:\n                await work.paced()\n"
                "                done = await self._turn(work, selector, keys[:reach])\n",
                "            while keys and work.is_wanted:\n"
                "                async with self._runner.reader._job_places:\n"
                "                    await work.paced()\n"
                "                done = await self._turn(work, selector, keys[:reach])\n",
            ),
        ),
        (READING + "test_one_that_waits_for_its_rate_or_its_commit_holds_no_place",),
    ),
    Mutant(
        "each-read-of-a-job-takes-the-bytes-of-all",
        "jobs together have more rows in memory than they may",
        (
            Edit(
                READS,
                "self._read(ids, JOB_READ_BYTES_MAX // JOB_READS_MAX, bodies=bodies)\n",
                "self._read(ids, JOB_READ_BYTES_MAX, bodies=bodies)\n",
            ),
        ),
        (READING + "test_what_jobs_read_has_few_places_and_few_bytes",),
    ),
)
