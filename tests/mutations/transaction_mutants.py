"""Seeded bugs of transactions; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import INTAKE, Edit, Mutant

TRANSACTIONS = "tickwheel/engine/transactions.py"
STATE = "tickwheel/engine/state.py"
EFFECTS = "tickwheel/model/effects.py"
MODELS = "tickwheel/model/transactions.py"
REGISTRY = "tickwheel/engine/transaction_registry.py"
CHECKBACKS = "tickwheel/server/shard/checkbacks.py"
OPERATIONS = "tickwheel/server/shard/operations/transacting.py"
RULES = "tests/engine/test_engine_transactions.py::"
MODEL = "tests/engine/test_transactions_model.py::TestTransactions::runTest"
ASKING = "tests/engine/test_transactions_model.py::TestAsking::runTest"
ASKED = "tests/server/test_checkbacks.py::"
DISK = "tests/persistence/sqlite/test_sqlite_disk_use.py::"
HIDDEN = "tests/server/test_guard.py::"

TRANSACTION_MUTANTS = (
    Mutant(
        "half-tasks-that-outlive-their-commit",
        "what a commit has made tasks of stays in the store",
        (
            Edit(
                TRANSACTIONS,
                "        for part in transaction.parts:\n"
                "            effects.drop(TRANSACTION, (name, part))\n",
                "",
            ),
        ),
        (RULES + "test_a_commit_makes_all_of_them_tasks_at_once", MODEL),
    ),
    Mutant(
        "a-refused-decision-that-stays",
        "a batch that was refused has decided its transactions all the same",
        (Edit(INTAKE, "            core.transaction_registry.undo(batch)\n", ""),),
        (RULES + "test_what_is_refused_was_never_done[refuse]",),
    ),
    Mutant(
        "a-decision-rests-on-what-may-be-undone",
        "a command does not wait until the one before it is durable",
        (
            Edit(
                TRANSACTIONS,
                "        return staged is None or (staged is self._core.open and not"
                " is_decided)\n",
                "        return True or staged is is_decided\n",
            ),
        ),
        (RULES + "test_nobody_acts_on_what_may_be_undone",),
    ),
    Mutant(
        "half-tasks-have-no-room",
        "a commit may find that there are too many tasks",
        (Edit(STATE, "        return left - self.staged - self.transaction_registry.tasks\n",
              "        return left - self.staged\n"),),
        (RULES + "test_half_tasks_are_no_tasks",),
    ),
    Mutant(
        "who-comes-back-is-not-asked",
        "what was parked for lack of anybody stays parked",
        (Edit(MODELS, "        return is_missed and not self.state.is_decided\n",
              "        return is_missed and self.state is TransactionState.OPEN\n"),),
        (
            RULES + "test_who_comes_late_is_asked_what_nobody_was[False]",
            ASKED + "test_who_returns_is_asked_at_once_parked_or_not[4]",
            ASKING,
        ),
    ),
    Mutant(
        "a-stranger-is-asked-in-a-members-place",
        "whoever says a producer group is one of its members",
        (Edit(CHECKBACKS, " or not line.is_of(row):\n", ":\n"),),
        (ASKED + "test_a_stranger_changes_nothing",),
    ),
    Mutant(
        "who-comes-makes-it-time-to-ask",
        "each that says a producer group brings the end of the questions nearer",
        (
            Edit(
                TRANSACTIONS,
                "        if reached <= row.reached:\n",
                "        if reached <= row.reached:\n"
                "            self._ask_in_time(found, now_ms, mono_ms, ask)\n",
            ),
        ),
        (ASKED + "test_a_stranger_changes_nothing", ASKING),
    ),
    Mutant(
        "an-owner-is-asked-after-others",
        "whoever else may decide is asked in its place",
        (Edit(CHECKBACKS, "        for reach in (Reach.OWN, Reach.ANOTHER):\n",
              "        for reach in (Reach.ANOTHER, Reach.OWN):\n"),),
        (ASKED + "test_its_owner_is_asked_before_others_who_could_decide",),
    ),
    Mutant(
        "who-comes-while-a-check-is-staged-is-forgotten",
        "what is on its way to the store is not asked about when it is there",
        (
            Edit(
                REGISTRY,
                "                self.returning[name] = None\n",
                "                pass\n",
            ),
        ),
        (ASKED + "test_who_comes_while_the_check_is_on_its_way_to_the_store_is_asked",),
    ),
    Mutant(
        "times-to-ask-are-of-the-wall-clock",
        "a clock that is put back silences the questions, one that is put forward hurries them",
        (
            Edit(
                TRANSACTIONS,
                "            found = self._registry.pop(mono_ms)\n",
                "            found = self._registry.pop(now_ms)\n",
            ),
            Edit(
                TRANSACTIONS,
                "        found.check_ms = mono_ms + self._core",
                "        found.check_ms = now_ms + self._core",
            ),
            Edit(
                TRANSACTIONS,
                "name, check_ms = halves.transaction, mono_ms + self._core",
                "name, check_ms = halves.transaction, now_ms + self._core",
            ),
        ),
        (ASKED + "test_a_wall_clock_that_is_put_back_silences_nobody", ASKING),
    ),
    Mutant(
        "a-page-looks-at-all-transactions",
        "a page of transactions takes as long as there are names",
        (
            Edit(
                OPERATIONS,
                "self._registry.listed(after, wanted.state)",
                "sorted(n for n in self._registry.known if n > after)",
            ),
        ),
        ("tests/server/http/test_operators.py::"
         "test_a_page_of_transactions_looks_at_what_it_shows",),
    ),
    Mutant(
        "half-tasks-use-up-the-reserve",
        "a store without room takes half tasks",
        (
            Edit(
                EFFECTS,
                "        return bool(self.enqueued) or any(\n",
                "        return bool(self.enqueued) or False and any(\n",
            ),
        ),
        (DISK + "test_half_tasks_are_refused_as_tasks_are_and_decisions_are_taken",),
    ),
    Mutant(
        "a-transaction-of-others-is-added-to",
        "whoever knows the name of a transaction may put tasks into it",
        (Edit(OPERATIONS, "        if not all(map(topics, row.topics)):\n",
              "        if False and topics:\n"),),
        (HIDDEN + "test_transactions_of_other_topics_are_not_there_but_keep_their_names",),
    ),
)  # fmt: skip
