"""Seeded bugs of HTTP; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import Edit, Mutant

PRODUCING = "tickwheel/server/shard/operations/producing.py"
OPERATIONS = "tickwheel/server/shard/operations/__init__.py"
HTTP = "tickwheel/server/http/"
TASKS = "tests/server/http/test_tasks.py::"
DELIVERIES = "tests/server/http/test_deliveries.py::"
BULK = "tests/server/http/test_bulk.py::"
API = "tests/server/http/test_api.py::"
SESSIONS = "tests/server/http/test_sessions.py::"

FAILOVER = "tests/e2e/test_failover.py::"
LEADERSHIP = "tests/server/cluster/test_leadership.py::"

HTTP_MUTANTS = (
    Mutant(
        "a-standby-names-tcp-only",
        "an HTTP client that asks a standby is not told where the leader answers HTTP",
        (
            Edit(
                "tickwheel/server/cluster/failover.py",
                '            leadership.http = self.http_url or ""\n',
                "            pass\n",
            ),
        ),
        (FAILOVER + "test_a_standby_names_the_leaders_http_and_each_lists_both",),
    ),
    Mutant(
        "a-standby-writes-into-an-empty-store",
        "one that waits for its turn says so also in a store that nobody has laid out",
        (
            Edit(
                "tickwheel/server/cluster/lease.py",
                "        if self.leader is None or self._as_standby is None or often_enough:\n",
                "        if self._as_standby is None or often_enough:\n",
            ),
        ),
        (
            LEADERSHIP
            + "test_a_standby_says_so_as_often_as_a_lease_is_renewed_and_only_behind_a_leader",
        ),
    ),
    Mutant(
        "any-payload-under-a-known-key",
        "a request under a key that another payload came with is a new one",
        (
            Edit(
                PRODUCING,
                "        if session.requests and not session.knows(fingerprint):\n",
                "        if False:\n",
            ),
        ),
        (TASKS + "test_another_payload_under_the_same_key_is_refused",),
    ),
    Mutant(
        "a-key-is-taken-when-its-request-is-decided-of",
        "two payloads at once under one Idempotency-Key are both taken",
        (
            Edit(
                PRODUCING,
                "        if session.requests and not session.knows(fingerprint):\n",
                "        if session.answers and fingerprint not in session.answers:\n",
            ),
        ),
        (TASKS + "test_two_payloads_at_once_under_one_key_are_not_both_taken[both stay-replace]",),
    ),
    Mutant(
        "an-answered-pull-loses-its-leases",
        "the end of a request ends the leases of what it was answered with",
        (
            Edit(
                OPERATIONS,
                "        caller.others.clear()\n        if caller.subscribers or caller.pulls:\n",
                "        if True:\n",
            ),
        ),
        (DELIVERIES + "test_the_lease_of_an_answered_pull_outlives_its_connection",),
    ),
    Mutant(
        "a-lost-answer-keeps-its-leases",
        "a client that has gone before its answer is taken for one that has it",
        (Edit(HTTP + "api.py", "        if client.is_gone:\n", "        if False:\n"),),
        (DELIVERIES + "test_a_client_that_does_not_get_its_answer_loses_the_lease_soon",),
    ),
    Mutant(
        "a-stream-shows-no-life",
        "what is settled over other connections says nothing of a stream's consumer",
        (
            Edit(
                HTTP + "handlers/settling.py",
                "            self._streams.heard(number, call.exchange.caller.principal)\n",
                "            pass\n",
            ),
        ),
        (DELIVERIES + "test_a_consumer_that_let_a_lease_lapse_is_handed_more_when_it_shows_life",),
    ),
    Mutant(
        "a-body-is-read-whatever-its-length",
        "a length over the limit is found out by reading",
        (
            Edit(
                HTTP + "bodies.py",
                "        if self._announced > self._bytes_max:\n",
                "        if 0:\n",
            ),
        ),
        (API + "test_a_body_is_refused_by_its_length_before_it_is_read",),
    ),
    Mutant(
        "bodies-are-not-counted-together",
        "each request has the limit of all",
        (
            Edit(
                HTTP + "bodies.py",
                "        if self.bytes + count > self.bytes_max:\n",
                "        if 0:\n",
            ),
        ),
        (API + "test_all_bodies_together_have_a_limit",),
    ),
    Mutant(
        "a-packed-bomb-is-unpacked",
        "what a body unpacks to is not bounded",
        (
            Edit(
                HTTP + "bodies.py",
                "self._unpacked(part, self._bytes_max - self._taken + 1)",
                "self._unpacked(part, 1 << 30)",
            ),
            Edit(
                HTTP + "bodies.py",
                "        if self._taken + count > self._bytes_max:\n",
                "        if 0:\n",
            ),
        ),
        (BULK + "test_a_packed_bomb_and_what_is_not_packed",),
    ),
    Mutant(
        "a-wrong-line-takes-others-along",
        "lines that came together with one that is refused are refused with it",
        (
            Edit(
                HTTP + "bulk.py", " and len(lines) > 1 and not answer.retryable:\n", " and False:\n"
            ),
        ),
        (BULK + "test_a_wrong_line_is_answered_and_the_others_are_taken",),
    ),
    Mutant(
        "any-page-may-ask",
        "a browser's word about whose page asks is not looked at",
        (Edit(HTTP + "api.py", "            _check_origin(headers)\n", ""),),
        (API + "test_a_page_of_another_site_must_not_ask",),
    ),
    Mutant(
        "no-token-is-asked-for",
        "whoever comes may do all",
        (
            Edit(
                HTTP + "api.py",
                'principal = self._principal(route, headers, connection.get("certificate"))',
                "from tickwheel.server.shard.access import ANONYMOUS as principal",
            ),
        ),
        (API + "test_without_the_token_nothing_is_done",),
    ),
    Mutant(
        "a-cookie-counts-alone",
        "a page on another port of the host acts as whoever is logged in",
        (
            Edit(
                HTTP + "api.py",
                "        if route.page or CONSOLE_HEADER in headers:\n",
                "        if True:\n",
            ),
        ),
        (
            SESSIONS + "test_a_cookie_counts_for_nothing_without_our_header[/v1/stats]",
            SESSIONS + "test_nobody_else_can_log_somebody_out",
        ),
    ),
    Mutant(
        "a-link-logs-in-twice",
        "whoever reads it later is let in as well",
        (
            Edit(
                HTTP + "sessions.py",
                "self._links.pop(_hash(code), None)",
                "self._links.get(_hash(code))",
            ),
        ),
        (SESSIONS + "test_a_link_logs_in_once",),
    ),
    Mutant(
        "a-session-outlives-its-token",
        "who is revoked goes on in the browser",
        (
            Edit(
                HTTP + "sessions.py",
                "        return is_in_time and self._logins.is_valid(session.principal)\n",
                "        return is_in_time\n",
            ),
        ),
        (
            SESSIONS + "test_a_session_ends_with_its_time_and_with_its_token",
            SESSIONS + "test_a_link_is_short_lived_and_ends_with_its_token",
        ),
    ),
    Mutant(
        "one-token-fills-all-sessions",
        "nobody else can log in any more",
        (
            Edit(
                HTTP + "sessions.py",
                "        for key in own[: max(0, len(own) + 1 - each_max)]:\n",
                "        for key in ():\n",
            ),
        ),
        (SESSIONS + "test_each_token_has_a_few_sessions_and_links_at_a_time",),
    ),
)
