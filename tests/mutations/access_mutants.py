"""Seeded bugs of tokens and rights; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import Edit, Mutant

GUARD = "tickwheel/server/shard/guard.py"
LOGINS = "tickwheel/server/logins.py"
TOKENS = "tickwheel/server/tokens.py"
OPERATIONS = "tickwheel/server/shard/operations/"
RIGHTS = "tests/server/test_rights.py::"
HIDDEN = "tests/server/test_guard.py::"
ENTRY = "tests/server/test_logins.py::"
TLS = "tickwheel/server/tls.py"
AUDIT = "tickwheel/server/shard/audit.py"
QUOTAS = "tests/server/test_quotas.py::"

ACCESS_MUTANTS = (
    Mutant(
        "to-be-asked-hides-a-decision",
        "who says that it answers for a producer group decides about others' without a line",
        (
            Edit(
                "tickwheel/server/shard/checkbacks.py",
                "        if caller.principal.name != row.owner:\n            return False\n",
                "",
            ),
        ),
        (
            "tests/server/test_audit.py::"
            "test_a_decision_about_what_is_anothers_is_in_it_whoever_is_asked",
        ),
    ),
    Mutant(
        "anybodys-receipt-shows-life",
        "whoever can write a number keeps a consumer alive that is not its own",
        (
            Edit(
                "tickwheel/server/http/handlers/consuming.py",
                " or exchange.caller.principal.name != principal.name:\n",
                ":\n",
            ),
        ),
        ("tests/server/http/test_deliveries.py::test_the_receipt_of_somebody_else_shows_no_life",),
    ),
    Mutant(
        "a-right-that-is-not-checked",
        "whoever has some right for a topic has every right for it",
        (
            Edit(
                GUARD,
                "        if not self._has(need.right):\n",
                "        if not self._principal.grants:\n",
            ),
            Edit(
                GUARD,
                "        topics = self._principal.topics(need.right)\n",
                "        topics = self._principal.topics(self._principal.grants[0][0])\n",
            ),
        ),
        (RIGHTS + "test_tcp[read=*]", RIGHTS + "test_http[consume=t]"),
    ),
    Mutant(
        "the-topic-is-not-checked",
        "a right for one topic is one for all",
        (Edit(GUARD, "        if not topics(topic):\n", "        if False:\n"),),
        (
            RIGHTS + "test_tcp[produce=u]",
            RIGHTS + "test_http[consume=u]",
            HIDDEN + "test_one_topic_that_may_not_be_refuses_the_whole_request",
        ),
    ),
    Mutant(
        "only-the-first-task-is-checked",
        "the others of a request may be of any topic",
        (
            Edit(
                GUARD,
                "    for index, task in enumerate(tasks):\n",
                "    for index, task in enumerate(tasks[:1]):\n",
            ),
        ),
        (HIDDEN + "test_one_topic_that_may_not_be_refuses_the_whole_request",),
    ),
    Mutant(
        "what-is-in-no-table-is-done",
        "a new operation is open to everybody until somebody thinks of its right",
        (
            Edit(
                GUARD,
                '        return partial(self._refuse, f"{name} is in no table of rights")\n',
                "        return getattr(self.begin.__self__._operations, name)\n",
            ),
        ),
        (RIGHTS + "test_what_the_table_does_not_name_is_refused",),
    ),
    Mutant(
        "the-rights-of-a-token-are-not-used",
        "whoever has a token may do all",
        (
            Edit(
                "tickwheel/server/tcp/connection.py",
                "        self._table = self._shared.table_of(hello.principal)\n",
                "        self._table = self._shared.table_of(hello.principal._replace(grants=None)"
                ")\n",
            ),
        ),
        (HIDDEN + "test_frames_behind_hello_in_one_piece_have_its_rights",),
    ),
    Mutant(
        "ids-of-other-topics-are-found",
        "what is named by an id is not asked for its topic",
        (
            Edit(
                OPERATIONS + "controlling.py",
                "    return only is None or (task is not None and only(task.row.topic))\n",
                "    return True\n",
            ),
            Edit(
                OPERATIONS + "controlling.py",
                "                    if only is not None and not only(topic):\n",
                "                    if False:\n",
            ),
        ),
        (HIDDEN + "test_ids_of_other_topics_are_unknown",),
    ),
    Mutant(
        "many-ids-at-once-are-found",
        "tasks of which nothing but a body is recorded are not asked for their topics",
        (
            Edit(
                OPERATIONS + "controlling.py",
                "                    if only is not None and not only(topic):\n",
                "                    if False:\n",
            ),
        ),
        ("tests/e2e/test_tokens_daemon.py::test_ids_of_other_topics_are_unknown_in_packs_too",),
    ),
    Mutant(
        "a-schedule-of-others-is-taken-over",
        "a schedule that is there is not asked for its topic",
        (
            Edit(
                OPERATIONS + "scheduling.py",
                "        if known is not None and not only(known.row.schedule.topic):\n",
                "        if False:\n",
            ),
        ),
        (HIDDEN + "test_schedules_of_other_topics_are_not_there_but_keep_their_names",),
    ),
    Mutant(
        "any-session-is-resumed",
        "who names the session of another is taken for it",
        (
            Edit(
                "tickwheel/server/tcp/greeting.py",
                "    if session is not None and principal.is_limited:\n",
                "    if False:\n",
            ),
        ),
        (HIDDEN + "test_nobody_gets_into_the_session_of_another",),
    ),
    Mutant(
        "an-expired-token-passes",
        "the end of a token is only shown",
        (
            Edit(
                LOGINS,
                "        if token is None or token.is_over(now_ms):\n",
                "        if token is None:\n",
            ),
        ),
        (ENTRY + "test_a_token_that_is_over_opens_nothing_and_ends_what_it_opened",),
    ),
    Mutant(
        "any-secret-of-a-known-id",
        "who knows the id of a token needs no secret",
        (Edit(TOKENS, "    return found if is_right else None\n", "    return found\n"),),
        (ENTRY + "test_guesses_are_refused_and_counted",),
    ),
    Mutant(
        "a-revoked-token-stays-connected",
        "a token is asked for at the beginning only",
        (
            Edit(
                "tickwheel/server/tcp/listener.py",
                "            if not self._logins.is_valid(connection.caller.principal):\n",
                "            if False:\n",
            ),
        ),
        (
            ENTRY + "test_a_revoked_token_ends_its_connections_and_no_others",
            "tests/e2e/test_tokens_daemon.py::test_a_revoked_token_ends_what_it_opened",
        ),
    ),
    Mutant(
        "a-broken-file-locks-everybody-out",
        "a file that cannot be read has no tokens",
        (
            Edit(
                LOGINS,
                "            self._observed.tokens_file_ok = False\n            return\n",
                "            self._observed.tokens_file_ok = False\n            self._tokens = {}\n"
                "            return\n",
            ),
        ),
        (ENTRY + "test_a_broken_file_keeps_the_tokens_of_before",),
    ),
    Mutant(
        "the-secret-is-kept",
        "the file has what opens the door",
        (
            Edit(
                TOKENS,
                '    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()\n',
                "    return secret\n",
            ),
        ),
        ("tests/server/test_tokens.py::test_the_secret_is_in_no_file",),
    ),
    Mutant(
        "a-token-goes-where-there-is-no-tls",
        "a client follows a standby's hint to a port without TLS",
        (
            Edit(
                "tickwheel/client/reconnector.py",
                "return None if address[0] in NOWHERE or is_secure(value) != secure else address",
                "return None if address[0] in NOWHERE else address",
            ),
        ),
        ("tests/client/test_client_failover.py::test_a_hint_that_speaks_otherwise_is_none",),
    ),
    Mutant(
        "a-broken-certificate-is-taken",
        "files that cannot be used end what was there before",
        (
            Edit(
                TLS,
                "            observed.certificate_ok = False\n            return\n",
                "            observed.certificate_ok = False\n            self._context = None\n"
                "            return\n",
            ),
        ),
        (
            "tests/server/test_tls.py"
            "::test_new_files_are_for_the_next_connection_and_broken_ones_for_none",
        ),
    ),
    Mutant(
        "handshakes-without-end",
        "those that say nothing are kept, however many they are",
        (
            Edit(
                TLS,
                "            if len(self._waiting) >= self._most:\n",
                "            if len(self._waiting) >= self._most:\n                sock.close()\n"
                "                continue\n            if False:\n",
            ),
        ),
        ("tests/e2e/test_tls.py::test_handshakes_that_do_not_end_stop_nobody",),
    ),
    Mutant(
        "a-certificate-needs-only-one-part",
        "a rule of two parts is opened by one of them",
        (Edit(LOGINS, "if named <= parts), None)", "if named & parts), None)"),),
        ("tests/server/test_logins.py::test_a_rule_needs_all_of_its_parts",),
    ),
    Mutant(
        "a-resend-hears-of-a-quota",
        "what was accepted is refused when it is asked again",
        (
            Edit(
                OPERATIONS + "producing.py",
                "        if self._was_answered(caller, request, floor, now, tasks):\n"
                "            return\n        new_tasks, size, rules",
                "        if caller.quota is not None:\n"
                "            caller.quota.check(self._core, now.mono_ms)\n"
                "        if self._was_answered(caller, request, floor, now, tasks):\n"
                "            return\n        new_tasks, size, rules",
            ),
        ),
        (QUOTAS + "test_a_resend_is_answered_also_above_a_quota",),
    ),
    Mutant(
        "pending-counts-the-topics-of-others",
        "a quota of pending tasks is of the whole daemon",
        (
            Edit(
                "tickwheel/server/shard/quotas.py",
                "core.tally(topics)",
                "core.tally(lambda name: True)",
            ),
        ),
        (QUOTAS + "test_tasks_that_are_not_finished_of_the_topics_that_it_may_produce_to",),
    ),
    Mutant(
        "the-audit-log-comes-after-the-answer",
        "who was answered is not in it yet",
        (
            Edit(
                AUDIT,
                '        self._end(answer.request, "ok", answer.counts)\n',
                "",
            ),
        ),
        ("tests/server/test_audit.py::test_a_line_is_there_before_its_answer",),
    ),
    Mutant(
        "refusals-are-in-no-audit-log",
        "who tries what they may not leaves no line",
        (Edit(AUDIT, "                asking.replies.failed(request, error.code)\n", ""),),
        ("tests/server/test_audit.py::test_over_http_too_and_what_is_refused",),
    ),
    Mutant(
        "a-clean-stop-forgets-lines-of-the-audit-log",
        "what waits for the thread is not written at the end",
        (
            Edit(
                AUDIT,
                "            some = list(self._lines)\n",
                "            some = [] if self._closing else list(self._lines)\n",
            ),
        ),
        ("tests/server/test_audit.py::test_a_clean_stop_waits_for_every_line",),
    ),
    Mutant(
        "a-token-for-some-topics-sees-the-counts-of-all",
        "STATS is not narrowed to the topics that may be read",
        (
            Edit(
                "tickwheel/server/shard/stats.py",
                "if only is None or only(topic.name)",
                "if topic.name",
            ),
        ),
        ("tests/server/test_guard.py::test_stats_are_of_the_topics_that_may_be_read",),
    ),
    Mutant(
        "any-name-is-a-name-of-ours",
        "Host is not looked at where there are no tokens",
        (
            Edit(
                "tickwheel/server/http/app.py",
                " and not is_named(value, names)",
                " and not names",
            ),
        ),
        ("tests/server/http/test_hosts.py::test_only_names_of_ours_are_answered",),
    ),
)
