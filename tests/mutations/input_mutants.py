"""Seeded bugs in what stands between a client's frames and the daemon's life."""

from __future__ import annotations

from mutations.mutants import SETTLEMENT, Edit, Mutant

BORDER_MODULE = "tickwheel/server/shard/border.py"
SQLITE_STORE = "tickwheel/persistence/sqlite/store.py"
ACKS = "tests/engine/test_engine_acks.py::"
BORDER = "tests/server/tcp/test_boundary.py::"
FUZZ = "tests/server/tcp/test_fuzz.py::test_anything_at_all[1]"
VALUES_MODULE = "tickwheel/model/values.py"
STORABLE = "tickwheel/server/shard/storable.py"
WALK = "tests/server/test_values.py::test_each_place_of_each_body_takes_or_refuses"
ENCODERS = "tests/server/test_values.py::test_what_an_encoder_cannot_say_is_refused_alone"
NO_BOUND = Edit(VALUES_MODULE, "elif not INTEGER_MIN <= value <= INTEGER_MAX:", "elif False:")
NO_PROOF = Edit(STORABLE, "            _pack(codec.extras_record(options))\n", "            pass\n")
"""Of a task's options."""

INPUT_MUTANTS = (
    Mutant(
        "a-receipt-that-nobody-got-acks",
        "epochs and attempts below the first one are taken for earlier receipts",
        (
            Edit(SETTLEMENT, "or not 0 < epoch <= lease.epoch\n", "or epoch > lease.epoch\n"),
            Edit(SETTLEMENT, "                or attempt < 1\n", ""),
        ),
        (ACKS + "test_no_receipt_that_cannot_have_been_given_ends_a_task[-in_flight]",),
    ),
    Mutant(
        "any-attempt-is-stored",
        "an ack by an earlier epoch's receipt brings an attempt that no store can hold",
        (Edit(SETTLEMENT, "not 0 < attempt <= ATTEMPT_MAX", "attempt < 1"),),
        (ACKS + "test_no_receipt_that_cannot_have_been_given_ends_a_task[restarted-ready]",),
    ),
    Mutant(
        "a-power-passes-the-largest-float",
        "the factor's power is taken before it is compared with the cap",
        (
            Edit(
                "tickwheel/model/retry.py",
                "if steps * math.log(self.factor) > math.log(cap_ms / base_ms):",
                "if base_ms * self.factor**steps > cap_ms:",
            ),
        ),
        (
            "tests/server/test_policies.py::test_growth_is_exact_until_the_cap[1000000.0]",
            "tests/engine/test_engine_policies.py::"
            "test_policies_at_their_extremes_for_a_hundred_attempts[retry1]",
        ),
    ),
    Mutant(
        "values-are-shown-whole",
        "an error message shows what a client sent with repr",
        (Edit("tickwheel/errors.py", "text = _shown.repr(value)", "text = repr(value)"),),
        (
            "tests/protocol/test_codec.py::test_nothing_is_too_deep_to_be_refused[1000-arrays]",
            "tests/server/tcp/test_daemon_fuzz.py::"
            "test_a_bomb_of_nesting_is_answered[False--arrays]",
            FUZZ,
        ),
    ),
    Mutant(
        "a-listing-opens-a-connection",
        "each listing needs descriptors, which clients can use up",
        (
            Edit(
                SQLITE_STORE,
                "            reader = self._listers.get()\n",
                "            reader = Reader(self._connect(LONG_CACHE_BYTES))\n",
            ),
        ),
        (
            "tests/persistence/sqlite/test_sqlite_errors.py::"
            "test_listings_need_no_connection_of_their_own",
            "tests/e2e/test_limits.py::"
            "test_without_any_descriptor_left_reads_go_on_and_the_rest_is_answered",
        ),
    ),
    Mutant(
        "half-a-change-is-survived",
        "an error in the middle of a command is answered like one before it",
        (Edit(BORDER_MODULE, "        self._acting = True\n", ""),),
        (BORDER + "test_an_error_in_the_middle_of_a_change_ends_the_daemon[nack]",),
    ),
    Mutant(
        "an-error-before-a-change-ends-the-daemon",
        "a command counts as begun before it has changed anything",
        (
            Edit(
                BORDER_MODULE,
                "        if self._acting:\n            self.fail",
                "        if True:\n            self.fail",
            ),
        ),
        (BORDER + "test_an_error_before_the_first_change_is_an_answer[28]",),
    ),
    Mutant(
        "a-policy-that-fails-ends-the-daemon",
        "only errors that are raised on purpose are expected of a policy",
        (
            Edit(
                SETTLEMENT,
                "        except Exception as error:\n            return Verdict(self._core.fault(",
                "        except KeyError as error:\n            return Verdict(self._core.fault(",
            ),
        ),
        (
            "tests/engine/test_engine_policies.py::"
            "test_a_task_whose_policy_cannot_be_computed_is_dead_with_the_reason[nack]",
        ),
    ),
    Mutant(
        "a-number-of-any-size-is-staged",
        "a property may be a whole number of more than 64 bits, and nothing is encoded before it is"
        " staged: one request ends the daemon",
        (NO_BOUND, NO_PROOF),
        (WALK,),
    ),
    Mutant(
        "what-is-staged-was-not-encoded",
        "the bounds alone keep from the store what it cannot hold",
        (NO_PROOF,),
        (ENCODERS + "[task]", ENCODERS + "[half task]"),
    ),
    Mutant(
        "a-setting-is-staged-unproven",
        "what is set, or done in bulk, is encoded by the store for the first time",
        (Edit(STORABLE, "    try:\n        encode()\n", "    try:\n        bool(encode)\n"),),
        (ENCODERS + "[settings]", ENCODERS + "[bulk]"),
    ),
    Mutant(
        "a-number-without-a-bound-is-only-too-large-to-store",
        "what is wrong with a number is said by the encoder, which knows no property",
        (NO_BOUND,),
        (
            "tests/model/test_values.py::test_what_is_wrong_is_said_with_its_name",
            "tests/model/test_values.py::test_what_passes_can_be_encoded",
        ),
    ),
    Mutant(
        "a-due-time-of-any-size-is-a-bulk-operations",
        "a bulk operation is stored with the moment that it was asked with, however long ago",
        (
            Edit(
                "tickwheel/server/checks.py",
                "if type(due_ms) is not int or due_ms < INTEGER_MIN:",
                "if type(due_ms) is not int:",
            ),
            Edit(STORABLE, "    try:\n        encode()\n", "    try:\n        bool(encode)\n"),
        ),
        (WALK,),
    ),
    Mutant(
        "a-schedule-begins-beyond-the-calendar",
        "a schedule's moments are bounded by what a number may be, and not by what a date may be",
        (
            Edit(
                "tickwheel/server/shard/operations/scheduling.py",
                "return _optional(given, field, 0, MOMENT_MS_MAX)",
                "return _optional(given, field, 0, 2**53 - 1)",
            ),
        ),
        (
            "tests/server/shard/test_scheduling.py::"
            "test_a_schedule_begins_and_ends_within_what_a_calendar_can_say",
        ),
    ),
)
