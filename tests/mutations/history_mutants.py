"""The seeded bugs of the daemon's end of the history."""

from __future__ import annotations

from mutations.mutants import COMMITTER, Edit, Mutant

RECORDER = "tickwheel/history/daemon.py"
HISTORY = "tickwheel/history/daemon.py"
STORIES = "tests/server/shard/test_stories.py::"
PENDING = "tests/history/test_pending.py::"
SERVICE = "tests/server/test_history_service.py::"

HISTORY_MUTANTS = (
    Mutant(
        "reply-before-its-history",
        "a kill between the answer and the spool loses what a client got as an answer",
        (
            Edit(
                COMMITTER,
                "        if self._history is not None:\n"
                "            self._history.keep(number, batch.notes)\n",
                "",
            ),
            Edit(
                COMMITTER,
                "        release(batch)\n",
                "        release(batch)\n"
                "        if self._history is not None:\n"
                "            self._history.keep(number, batch.notes)\n",
            ),
        ),
        (SERVICE + "test_what_is_answered_is_in_the_spool_already",),
    ),
    Mutant(
        "history-behind-the-store",
        "a kill after the store had a batch loses what the next daemon answers to a resend",
        (
            Edit(
                COMMITTER,
                "            self._history.prepare(number, batch.notes)\n",
                "            self._history.prepare(number, None)\n",
            ),
        ),
        (PENDING + "test_a_client_that_resends_gets_only_what_is_in_the_history",),
    ),
    Mutant(
        "history-of-a-refused-batch",
        "tasks that were refused stand in the history",
        (
            Edit(
                RECORDER,
                "            self._records[:0] = notes.records\n",
                "            self._records[:0] = notes.records\n"
                "            self._arrivals[:0] = notes.arrivals\n",
            ),
        ),
        (SERVICE + "test_a_refused_batch_leaves_no_arrivals",),
    ),
    Mutant(
        "history-of-what-was-withdrawn",
        "tasks that were refused while the store did not answer stand in the history",
        (
            Edit(
                RECORDER,
                "        self._arrivals, self._occurrences = _only(self._arrivals, accepted), []\n",
                "        return\n",
            ),
        ),
        (SERVICE + "test_what_was_withdrawn_leaves_nothing_and_what_was_unclear_is_there",),
    ),
    Mutant(
        "history-dropped-and-not-counted",
        "what was dropped after the first time is missing from the count",
        (
            Edit(
                HISTORY,
                "        self._missing += events\n",
                "        self._missing = events\n",
            ),
        ),
        (SERVICE + "test_a_full_spool_drops_history_says_so_once_and_goes_on",),
    ),
    Mutant(
        "history-waits-for-a-batch",
        "what no batch carries stays in memory",
        (
            Edit(
                HISTORY,
                "            if core.sealed is None and core.open.is_empty()",
                "            if core.sealed is not None and core.open.is_empty()",
            ),
        ),
        (SERVICE + "test_broadcasts_reach_the_files_without_a_batch",),
    ),
    Mutant(
        "histories-are-read-by-the-daemon",
        "whoever looks at histories takes the processor from the event loop",
        (
            Edit(
                "tickwheel/server/shard/stories.py",
                "        return read.answer_of(await reader.readline())\n",
                "        import json\n"
                "        from pathlib import Path\n\n"
                "        await reader.readline()\n"
                "        return read._answer(Path(str(self._folder)), json.loads(question))\n",
            ),
        ),
        (STORIES + "test_nothing_of_the_history_is_read_here",),
    ),
    Mutant(
        "a-story-without-an-end",
        "the story of a task that was tried for ever is taken into memory whole",
        (
            Edit(
                "tickwheel/history/read.py",
                "            if left < 0 or len(found) == limit:\n",
                "            if left < -(1 << 40):\n",
            ),
        ),
        ("tests/history/test_story.py::test_a_story_ends_at_its_bounds[EVENTS_MAX-3-3]",),
    ),
    Mutant(
        "an-answer-of-a-question-that-was-cut-off",
        "the next look-up gets the story of another task",
        (
            Edit(
                "tickwheel/server/shard/stories.py",
                "self._end()  # its answer would be taken for that of the next question\n",
                "pass\n",
            ),
        ),
        (STORIES + "test_a_question_that_is_cut_off_leaves_no_answer_to_the_next",),
    ),
)
