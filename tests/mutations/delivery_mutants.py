"""Seeded bugs of groups, policies and limits; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import DELIVERY, FIRING, SETTLEMENT, Edit, Mutant

OWNERSHIP = "tickwheel/engine/ownership.py"
READY = "tickwheel/engine/queues.py"
LATENESS = "tickwheel/engine/events.py"
SHARD = "tickwheel/server/shard/shard.py"
CAUSES = "tests/engine/test_lateness.py::"
COMMITTER = "tickwheel/server/shard/committer.py"
KINDS = "tests/engine/test_engine_kinds.py::"
SETTINGS = "tests/engine/test_engine_settings.py::"
CLOSED = "tests/engine/test_engine_closing.py::"
POLICIES = "tests/engine/test_engine_policies.py::"
GROUPS = "tests/e2e/test_groups_daemon.py::"

DEATHS = "tests/engine/test_engine_deaths.py::"
RECORDS = "tickwheel/model/records.py"
APART = "tickwheel/engine/delivery.py"

DELIVERY_MUTANTS = (
    Mutant(
        "a-death-is-a-failure",
        "a consumer that is killed uses up the retries of what it had",
        (Edit(RECORDS, "        if failure.is_death:\n", "        if False:\n"),),
        (DEATHS + "test_a_death_is_no_failure_and_is_waited_for",),
    ),
    Mutant(
        "a-restart-of-the-daemon-is-a-death",
        "leases of before a restart that nobody takes up count as deaths of consumers",
        (
            Edit(
                SETTLEMENT,
                "            if lease.subscriber.death:\n",
                "            if lease.subscriber.death or lease.subscriber is group.detached:\n",
            ),
        ),
        (DEATHS + "test_a_restart_of_the_daemon_kills_no_consumer",),
    ),
    Mutant(
        "a-stop-in-order-is-a-death",
        "a client that says goodbye counts as dead",
        (
            Edit(
                "tickwheel/server/shard/operations/producing.py",
                "        caller.has_left = True\n",
                "",
            ),
        ),
        ("tests/server/tcp/test_deaths.py::test_who_says_goodbye_does_not_die",),
    ),
    Mutant(
        "what-kills-is-not-alone",
        "innocent tasks die with one that kills its consumers, again and again",
        (
            Edit(
                DELIVERY,
                "        if attempts is None or self._is_alone or not self.apart.is_last("
                "attempts.past.deaths):\n",
                "        if True:\n",
            ),
        ),
        (
            DEATHS + "test_it_is_alone_on_its_connection_while_others_go_elsewhere",
            DEATHS + "test_no_task_ends_by_what_another_one_does_to_its_consumer",
        ),
    ),
    Mutant(
        "others-come-beside-what-is-alone",
        "a connection that has a task which kills its consumers is handed more",
        (
            Edit(
                "tickwheel/engine/topics.py",
                "        return 0 if self.presence.kept_for is not None else self.room\n",
                "        return self.room\n",
            ),
        ),
        (
            DEATHS + "test_it_is_alone_on_its_connection_while_others_go_elsewhere",
            DEATHS + "test_several_are_alone_on_several_connections",
        ),
    ),
    Mutant(
        "a-connection-is-kept-free-for-ever",
        "work that lasts costs its connection until it is done",
        (
            Edit(
                APART,
                "self._core.keeps[group] = Keep(presence, mono_ms + KEEP_MS)",
                "self._core.keeps[group] = Keep(presence, 1 << 62)",
            ),
        ),
        (DEATHS + "test_work_that_lasts_does_not_cost_a_connection",),
    ),
    Mutant(
        "once-is-not-finished-first",
        "an at-most-once delivery is written at once and stays unfinished",
        (Edit(DELIVERY, "        if subscriber.at_most_once:\n", "        if False:\n"),),
        (KINDS + "test_the_end_is_durable_before_the_delivery_is_written",),
    ),
    Mutant(
        "once-is-written-before-its-commit",
        "the frame of an at-most-once delivery leaves when its batch is sealed",
        (
            Edit(
                COMMITTER,
                '            failpoints.hit("commit.before")\n',
                "            if batch.handed and self._hand_over is not None:\n"
                "                self._hand_over(batch.handed)\n"
                "                batch.handed = []\n"
                '            failpoints.hit("commit.before")\n',
            ),
        ),
        (GROUPS + "test_a_kill_before_the_commit_sends_nothing[sqlite]",),
    ),
    Mutant(
        "a-pause-is-passed-over",
        "a paused group is handed tasks",
        (Edit(DELIVERY, " or group.is_held:\n", ":\n"),),
        (SETTINGS + "test_a_paused_group_does_not_stop_the_others",),
    ),
    Mutant(
        "a-rate-does-not-count",
        "deliveries take no tokens",
        (Edit(DELIVERY, "            bucket.take(len(items))\n", "            pass\n"),),
        (SETTINGS + "test_a_rate_lets_a_burst_go_and_then_one_after_the_other",),
    ),
    Mutant(
        "a-pause-is-the-daemons-fault",
        "what a pause held back counts as late through the daemon",
        (Edit(LATENESS, "        if group.is_held:\n            return Cause.PAUSED\n", ""),),
        (CAUSES + "test_a_pause_counts_while_nobody_has_subscribed",),
    ),
    Mutant(
        "a-late-delivery-has-no-cause",
        "the causes of a frame whose deliveries differ are not counted",
        (Edit(SHARD, "        elif causes is not None:\n", "        elif False:\n"),),
        ("tests/server/shard/test_delivering.py::test_each_late_delivery_is_counted_by_cause",),
    ),
    Mutant(
        "low-priorities-starve",
        "lower priorities have no turn of their own",
        (Edit(READY, "        lower = [p", "        return []\n        lower = [p"),),
        (KINDS + "test_low_priorities_get_one_of_sixteen",),
    ),
    Mutant(
        "a-ttl-ends-only-when-somebody-asks",
        "what comes due has no handle for the end of its ttl",
        (
            Edit(
                FIRING,
                "            core.lifetimes.begin(row)\n        if replayed:\n",
                "        if replayed:\n",
            ),
        ),
        (KINDS + "test_a_ttl_ends_though_nobody_asks[paused]",),
    ),
    Mutant(
        "a-tasks-own-policy-is-passed-over",
        "retries go by the policy of the group",
        (
            Edit(
                SETTLEMENT,
                "policy = self._core.policy(lease.traits.retry, lease.group)",
                "policy = self._core.policy(None, lease.group)",
            ),
        ),
        (POLICIES + "test_the_tasks_own_policy_its_groups_its_topics_the_daemons",),
    ),
    Mutant(
        "a-deleted-group-takes-others-tasks-along",
        "a task ends with the first group that lets go of it",
        (
            Edit(
                OWNERSHIP,
                "            if owed.remaining or owed.dead_lettered:\n                if was_owed",
                "            if False:\n                if was_owed",
            ),
        ),
        (CLOSED + "test_deleting_one_of_two_groups_drops_its_share_only",),
    ),
    Mutant(
        "what-comes-due-during-a-deletion-is-lost",
        "a task that comes due while its last group is being deleted is owed to nobody",
        (
            Edit(
                FIRING,
                "            topic.deferred[row.id] = row.due_ms\n",
                "            topic.scheduled -= 1\n            core.scheduled -= 1\n",
            ),
        ),
        (CLOSED + "test_what_comes_due_while_the_last_group_goes_waits_for_the_next",),
    ),
)
