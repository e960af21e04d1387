"""Seeded bugs of jobs; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import Edit, Mutant

ENGINE = "tickwheel/engine/jobs.py"
RUNNER = "tickwheel/server/shard/jobs.py"
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
        "a-job-that-skips-what-its-slice-had-no-time-for",
        "the rest of a slice that ended early is never looked at",
        (
            Edit(
                RUNNER,
                "                    done += seen.done\n        return done\n\n    def _step",
                "                    done += len(some)\n        return done\n\n    def _step",
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
)
