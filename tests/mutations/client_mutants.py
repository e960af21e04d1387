"""Seeded bugs in the client: time-outs, forks, and what a deployment must not do."""

from __future__ import annotations

from mutations.mutants import Edit, Mutant

PRODUCER = "tickwheel/client/producer.py"
TIMEOUTS = "tests/client/test_client_timeouts.py::"
SYNC = "tests/sync/test_sync_client.py::"
WORKER = "tests/client/test_worker.py::"

CLIENT_MUTANTS = (
    Mutant(
        "what-was-given-up-is-sent-later",
        "an enqueue whose time was over before it was sent goes out with the next connection",
        (
            Edit(PRODUCER, "if batch.done or batch.unwanted():", "if batch.unwanted():"),
            Edit(
                PRODUCER,
                "        self._queue = deque(batch for batch in self._queue if not batch.done)\n",
                "",
            ),
        ),
        (
            TIMEOUTS + "test_without_a_daemon_an_enqueue_ends_in_its_time"
            "_and_was_certainly_not_stored",
        ),
    ),
    Mutant(
        "a-named-time-ends-with-a-sweep",
        "a call's own time is looked at as seldom as everybody's",
        (
            Edit(
                "tickwheel/client/requests.py",
                "timer = self.reconnector.loop.call_at(until_s, call.expired)",
                "timer = self.reconnector.loop.call_at(until_s + 3600, call.expired)",
            ),
            Edit("tickwheel/client/requests.py", "call.deadline_s = until_s", "pass"),
        ),
        (TIMEOUTS + "test_a_call_that_was_sent_ends_in_its_time",),
    ),
    Mutant(
        "a-child-holds-its-parents-connection",
        "a fork leaves the parent's socket open in the child",
        (Edit("tickwheel/sync/client.py", "            made.forget()\n", ""),),
        (SYNC + "test_a_child_does_not_hold_its_parents_connection",),
    ),
    Mutant(
        "a-thread-that-takes-long-is-nacked",
        "the task of a plain function is given back while the function still runs",
        (
            Edit(
                "tickwheel/client/worker/job.py",
                "            if not done:\n",
                "            if not done:\n                raise TimeoutError\n",
            ),
        ),
        (WORKER + "test_a_thread_that_takes_too_long_keeps_its_task_until_it_ends",),
    ),
    Mutant(
        "another-policy-stops-a-deployment",
        "a worker insists on its code's policy",
        (
            Edit(
                "tickwheel/client/worker/worker.py",
                "        self._subscription.keep_the_groups_policy()\n",
                "",
            ),
        ),
        (WORKER + "test_a_group_with_another_policy_does_not_stop_a_deployment",),
    ),
)
