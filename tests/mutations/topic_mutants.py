"""Seeded bugs of topics that are deleted; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import Edit, Mutant

NEW_TASKS = "tickwheel/server/shard/new_tasks.py"
UPKEEP = "tickwheel/server/shard/background.py"
GROUPING = "tickwheel/server/shard/operations/grouping.py"
TOPICS = "tests/server/shard/test_topic_deletion.py::"
ALONE = "tests/server/shard/test_broadcast_only.py::"
UNUSED = "tests/server/shard/test_unused_groups.py::"

TOPIC_MUTANTS = (
    Mutant(
        "a-topic-that-goes-takes-tasks",
        "a task is confirmed and ends as deleted, or outlives its topic",
        (
            Edit(
                NEW_TASKS,
                "        if core.closing_topics:\n",
                "        if len(core.closing_topics) > 1:\n",
            ),
        ),
        (TOPICS + "test_nothing_is_taken_for_it_while_it_goes",),
    ),
    Mutant(
        "a-start-forgets-a-deletion",
        "a topic that was deleted before a crash is refused for ever, and keeps its tasks",
        (
            Edit(
                UPKEEP,
                "            if topic.settings.closed_ms is not None:\n",
                "            if topic.settings.closed_ms == 0:\n",
            ),
        ),
        (TOPICS + "test_a_start_goes_on_with_it[0]",),
    ),
    Mutant(
        "what-is-staged-does-not-hold-a-topic",
        "a topic is deleted without force although a task of it is about to be confirmed",
        (
            Edit(
                "tickwheel/engine/groups.py",
                "topic.scheduled + self._core.staged_on(topic.name)",
                "topic.scheduled",
            ),
        ),
        (TOPICS + "test_one_pending_task_is_enough[True]",),
    ),
    Mutant(
        "a-schedule-does-not-hold-its-topic",
        "the next run makes the deleted topic anew",
        (Edit(GROUPING, "        self._check_unscheduled(name)\n", ""),),
        (TOPICS + "test_a_schedule_that_enqueues_to_it_refuses_it_by_name[True]",),
    ),
    Mutant(
        "a-deleted-topic-keeps-its-settings",
        "a new topic of the name has the rate and the policy of the old one",
        (
            Edit(
                "tickwheel/engine/groups.py",
                "        self._set(topic, None)\n        topic.bucket = None\n",
                "        topic.bucket = None\n",
            ),
        ),
        (TOPICS + "test_all_that_it_held_ends_and_nothing_else",),
    ),
    Mutant(
        "a-topic-for-broadcasts-keeps-what-comes-due",
        "a backlog grows for a first group that can never be made",
        (
            Edit(
                "tickwheel/engine/firing.py",
                "            self.expire(topic.default_backlog, row)\n            return\n",
                "            self.expire(topic.default_backlog, row) if row.due_ms < 0 else None\n",
            ),
        ),
        (ALONE + "test_what_comes_due_is_broadcast_and_ends[1]",),
    ),
    Mutant(
        "a-group-with-subscribers-is-unused",
        "a group ends under its subscribers",
        (
            Edit(
                "tickwheel/server/shard/unused.py",
                "if group.was_used or group.subscribers or group.flight:",
                "if group.was_used:",
            ),
        ),
        (UNUSED + "test_they_end_by_setting_with_what_they_hold",),
    ),
)
