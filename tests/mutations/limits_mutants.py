"""Seeded bugs of limits; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import DELIVERY, Edit, Mutant

RECORDS = "tickwheel/model/records.py"
GROUPING = "tickwheel/engine/groups.py"
CONNECTION = "tickwheel/server/tcp/connection.py"
COMMANDS = "tickwheel/server/shard/reads.py"
LISTINGS = "tickwheel/server/shard/listings.py"
TOPICS = "tickwheel/engine/topics.py"
LIMITER = "tickwheel/server/shard/quotas.py"
QUOTAS = "tests/server/test_quotas.py::"
DELIVERING = "tests/engine/test_engine_delivery.py::"
BOUNDS = "tests/engine/test_engine_bounds.py::"
LIMITS = "tests/server/test_bounds.py::"
WAITING = "tests/server/shard/test_waiting_answers.py::"

LIMITS_MUTANTS = (
    Mutant(
        "half-tasks-are-not-pending",
        "whoever may have ten tasks may have any number in a transaction",
        (
            Edit(
                "tickwheel/engine/transaction_registry.py",
                "        self._tallies.count_all(counts, sign)\n",
                "",
            ),
        ),
        (
            QUOTAS + "test_pending_counts_whatever_will_be_a_task_and_nothing_of_others",
            "tests/engine/test_engine_transactions.py::test_half_tasks_are_no_tasks",
        ),
    ),
    Mutant(
        "the-load-of-others-is-pending",
        "what everybody has staged counts for each token",
        (
            Edit(
                LIMITER,
                "        return self._tally.tasks\n",
                "        return self._tally.tasks + core.staged\n",
            ),
        ),
        (QUOTAS + "test_pending_counts_whatever_will_be_a_task_and_nothing_of_others",),
    ),
    Mutant(
        "a-successor-begins-at-nothing",
        "a token with another scope counts nothing of what its predecessor has enqueued",
        (
            Edit(
                LIMITER,
                "            found = patterns.setdefault(principal.name, {})\n",
                "            found = patterns[principal.name] = {}\n",
            ),
        ),
        (QUOTAS + "test_a_token_counts_what_its_predecessor_has_put_elsewhere",),
    ),
    Mutant(
        "a-refused-batch-stays-pending",
        "what the store did not take counts for ever",
        (
            Edit(
                "tickwheel/engine/enqueue.py",
                "        core.tallies.count_all(batch.topics, -1)\n",
                "",
            ),
        ),
        ("tests/engine/test_engine_transactions.py::test_what_is_refused_was_never_done[refuse]",),
    ),
    Mutant(
        "dead-letters-are-pending",
        "whose tasks have died may enqueue nothing",
        (
            Edit(
                "tickwheel/engine/ownership.py",
                "            self._core.schedule_heap.ended((task_id,))\n"
                "            self._core.count_unfinished(group.topic.name, -1)\n",
                "            self._core.schedule_heap.ended((task_id,))\n",
            ),
        ),
        (QUOTAS + "test_pending_counts_down_with_whatever_ends_a_task",),
    ),
    Mutant(
        "one-token-takes-all-transactions",
        "a token without a quota leaves no room for others",
        (
            Edit(
                LIMITER,
                "        if count >= most:\n            why",
                "        if own and count >= most:\n            why",
            ),
        ),
        (QUOTAS + "test_whatever_tokens_take_of_transactions_others_find_room",),
    ),
    Mutant(
        "one-token-takes-all-bytes-of-transactions",
        "a few large transactions of one token leave no room for others",
        (Edit(LIMITER, "    if size_bytes > left_bytes:\n", "    if False:\n"),),
        (QUOTAS + "test_whatever_tokens_take_of_transactions_others_find_room",),
    ),
    Mutant(
        "values-of-properties-count-nowhere",
        "a task counts with its body, key and tag",
        (
            Edit(
                RECORDS,
                "            size += text_bytes(value) if type(value) is str else NUMBER_BYTES\n",
                "            size += NUMBER_BYTES\n",
            ),
        ),
        (
            BOUNDS + "test_a_task_takes_no_more_in_a_frame_than_it_counts",
            BOUNDS + "test_a_task_above_the_limit_of_a_frame_is_delivered_alone",
            LIMITS + "test_a_task_as_a_whole",
            LIMITS + "test_enqueues_that_wait_for_the_store",
        ),
    ),
    Mutant(
        "a-frame-ends-behind-the-task-that-is-too-much",
        "the size of a task is looked at after it was taken",
        (
            Edit(
                DELIVERY,
                "            if size > size_left and items:\n",
                "            if size_left <= 0:\n",
            ),
        ),
        (
            BOUNDS + "test_a_frame_ends_at_its_limit_of_bytes[1]",
            BOUNDS + "test_a_task_above_the_limit_of_a_frame_is_delivered_alone",
        ),
    ),
    Mutant(
        "a-topic-is-forgotten-with-tasks-on-their-way",
        "only what is on the wheel or due holds a topic",
        (
            Edit(
                GROUPING,
                "        return not any(batch is not None and topic.name in batch.topics"
                " for batch in batches)\n",
                "        return not any(batch is not None and not batch.topics"
                " for batch in batches[:0])\n",
            ),
        ),
        (BOUNDS + "test_what_holds_a_topic",),
    ),
    Mutant(
        "whoever-had-no-credit-never-has-a-turn-again",
        "credit that comes back does not bring a subscriber back into the line",
        (
            Edit(
                "tickwheel/engine/state.py",
                "            group.able[subscriber] = None\n            self.wake(group)\n",
                "            self.wake(group)\n",
            ),
        ),
        (BOUNDS + "test_whoever_gets_credit_back_has_a_turn_again",),
    ),
    Mutant(
        "acks-give-credit-however-many-wait-for-the-store",
        "a consumer runs away from a store that stands",
        (
            Edit(
                TOPICS,
                "min(self.unconfirmed, self.acks_ahead_max)\n",
                "self.unconfirmed\n",
            ),
        ),
        (
            DELIVERING + "test_credit_of_some_acks_comes_back_ahead_of_their_commit",
            LIMITS + "test_acks_of_a_subscription_ahead_of_the_store",
        ),
    ),
    Mutant(
        "at-most-once-deliveries-give-credit-before-their-commit",
        "what is delivered at most once has its credit back ahead of its commit",
        (
            Edit(
                TOPICS,
                "self.acks_ahead_max = 0 if at_most_once else acks_ahead_max\n",
                "self.acks_ahead_max = acks_ahead_max\n",
            ),
        ),
        (DELIVERING + "test_credit_of_an_at_most_once_delivery_never_comes_ahead_of_its_commit",),
    ),
    Mutant(
        "requests-are-looked-at-however-many-wait",
        "a peer whose answers wait goes on asking",
        (
            Edit(
                CONNECTION,
                "        return self.paused or self._operations.is_behind(self.caller)\n",
                "        return self.paused\n",
            ),
        ),
        (
            LIMITS + "test_answers_that_wait_for_the_store_of_one_connection",
            LIMITS + "test_answers_that_wait_for_the_store_of_all_connections",
        ),
    ),
    Mutant(
        "the-ids-behind-the-bytes-of-a-read-are-skipped",
        "what a read left is taken for gone",
        (Edit(COMMANDS, "                if unread:\n", "                if False:\n"),),
        (LIMITS + "test_a_command_of_many_large_tasks_reads_some_of_them_at_a_time",),
    ),
    Mutant(
        "listings-in-order-of-arrival",
        "a connection with many of them goes first until all are done",
        (
            Edit(
                LISTINGS,
                "                self._waiting[caller] = line  # behind the others\n",
                "                self._waiting[caller] = line\n"
                "                self._waiting.move_to_end(caller, last=False)\n",
            ),
            Edit(
                LISTINGS,
                "        return caller not in self._busy and self._takes_more(caller)\n",
                "        return self._takes_more(caller)\n",
            ),
        ),
        (LIMITS + "test_listings_of_all_connections_in_turn",),
    ),
    Mutant(
        "answers-wait-as-values",
        "what waits for the store takes several times what it counts",
        (
            Edit(
                CONNECTION,
                "        return answer if value is None else self._encode(answer)\n",
                "        return answer\n",
            ),
        ),
        (
            WAITING + "test_what_waits_takes_no_more_than_it_counts[lookup]",
            WAITING + "test_what_waits_takes_no_more_than_it_counts[nack]",
        ),
    ),
    Mutant(
        "commands-answer-who-is-behind",
        "only requests that were not taken wait for room",
        (
            Edit(
                COMMANDS,
                "parts[0][0] and not self._has_room(command.caller):\n",
                "parts[0][0] and False:\n",
            ),
        ),
        (WAITING + "test_so_it_is_with_requests_that_came_in_one_piece[lookup]",),
    ),
    Mutant(
        "who-is-behind-holds-up-all-commands",
        "a command waits for as long as its caller asks for other things",
        (
            Edit(
                COMMANDS,
                "                if not self._has_room(self._waiting[0].caller):\n",
                "                while not self._has_room(self._waiting[0].caller):\n",
            ),
        ),
        (WAITING + "test_who_asks_for_much_holds_up_nobody_for_long",),
    ),
)
