"""Seeded bugs of transactions; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import INTAKE, Edit, Mutant

TRANSACTIONS = "tickwheel/engine/transactions.py"
STATE = "tickwheel/engine/state.py"
EFFECTS = "tickwheel/model/effects.py"
OPERATIONS = "tickwheel/server/shard/operations/transacting.py"
RULES = "tests/engine/test_engine_transactions.py::"
MODEL = "tests/engine/test_transactions_model.py::TestTransactions::runTest"
DISK = "tests/persistence/sqlite/test_sqlite_disk_use.py::"
HIDDEN = "tests/server/test_guard.py::"

TRANSACTION_MUTANTS = (
    Mutant(
        "half-tasks-that-outlive-their-commit",
        "what a commit has made tasks of stays in the store",
        (
            Edit(
                TRANSACTIONS,
                "        effects.transactions.update({(name, part): None for part in"
                " transaction.parts})\n",
                "",
            ),
        ),
        (RULES + "test_a_commit_makes_all_of_them_tasks_at_once", MODEL),
    ),
    Mutant(
        "a-refused-decision-that-stays",
        "a batch that was refused has decided its transactions all the same",
        (Edit(INTAKE, "            core.book.undo(batch)\n", ""),),
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
        (Edit(STATE, "        return left - self.staged - self.book.tasks\n",
              "        return left - self.staged\n"),),
        (RULES + "test_half_tasks_are_no_tasks",),
    ),
    Mutant(
        "who-comes-back-is-not-asked",
        "what was parked for lack of anybody stays parked",
        (Edit(TRANSACTIONS, "            if row.state is _PARKED and not row.asked:\n",
              "            if False:\n"),),
        (RULES + "test_who_comes_late_is_asked_what_nobody_was[False]",),
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
