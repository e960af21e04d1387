"""The judge of order keys and shares in a torture run: what it has to find, what is allowed."""

from __future__ import annotations

from itertools import count

from crash.ordered import Seen, Sent, judge_order, judge_shares

A, B, C = 1, 2, 3
LEASE_MS, MS = 400, 10_000


class Story:
    """What consumers saw and sent, in its order."""

    def __init__(self) -> None:
        self._order = count(1)
        self.seen: list[Seen] = []
        self.sent: list[Sent] = []

    def came(
        self, task: int, attempt: int = 1, *, epoch: int = 1, tenant: str = "t", at_ms: int = MS,
        link: int = 1, due_ms: int | None = None
    ) -> Story:  # fmt: skip
        due_ms = task if due_ms is None else due_ms
        order = next(self._order)
        self.seen.append(
            Seen(task, "g", "k", tenant, due_ms, epoch, attempt, order, at_ms, link)
        )  # fmt: skip
        return self

    def sends(self, kind: str, task: int, attempt: int = 1, epoch: int = 1) -> Story:
        self.sent.append(Sent(task, "g", epoch, attempt, next(self._order), kind))
        return self

    def order(self) -> list[str]:
        return [text.split(":")[0] for text in judge_order(self.seen, self.sent)]

    def shares(self, limit: int, closed_ms: dict[int, int] | None = None) -> int:
        return len(judge_shares(self.seen, self.sent, closed_ms or {}, limit, LEASE_MS))


def test_tasks_in_order_have_no_problems() -> None:
    assert Story().came(A).sends("ack", A).came(B).sends("ack", B).came(C).order() == []
    nacked = Story().came(A).sends("nack", A).came(A, 2).sends("ack", A, 2).came(B)
    assert nacked.order() == []
    lapsed = Story().came(A).came(A, 2).sends("ack", A).sends("ack", A, 2).came(B)
    assert lapsed.order() == []
    killed = Story().came(A).sends("ack", A).came(A, epoch=2).sends("ack", A, epoch=2).came(B)
    assert killed.order() == []
    frozen = Story().came(A, 2, at_ms=MS + 500).came(A).sends("ack", A, 2)
    assert frozen.came(B, at_ms=MS + 600).came(A, at_ms=MS).order() == [], "written long before"


def test_a_requeued_dead_letter_is_not_a_problem() -> None:
    story = Story().came(A).sends("reject", A).came(B).sends("ack", B).came(A, 2).sends("ack", A, 2)
    assert story.came(C).order() == []


def test_each_broken_promise_is_found() -> None:
    assert Story().came(A).came(B).order() == ["two at a time"]
    late = Story().came(A).came(B).sends("ack", A)
    assert late.order() == ["two at a time"]
    stale = Story().came(A).came(A, 2).sends("ack", A).came(B)
    assert stale.order() == ["two at a time"], "the end of an earlier delivery is none"
    killed = Story().came(A).came(B, epoch=2)
    assert killed.order() == ["two at a time"], "nobody has sent any end"
    forgotten = Story().came(A).came(A, 2).sends("ack", A).came(B, epoch=2)
    assert forgotten.order() == ["two at a time"], "somebody has had it since, and has it still"
    given_back = Story().came(A).sends("release", A).came(B)
    assert given_back.order() == ["two at a time"]
    overtaken = Story().came(A, due_ms=9).sends("release", A).came(B, due_ms=8)
    assert overtaken.order() == ["out of order"], "it has had no turn, so it may be overtaken"
    again = Story().came(A).sends("ack", A).came(B).came(A, 2)
    assert again.order() == ["again, after a later one of its key"]
    unheard = Story().came(B).sends("ack", B).came(A, epoch=2).came(B, epoch=2)
    assert unheard.order() == ["out of order"], "B may come again: A is no later one"
    skipped = Story().came(B).sends("ack", B).came(A)
    assert skipped.order() == ["out of order"]
    by_due = Story().came(A, due_ms=9).sends("ack", A).came(B, due_ms=8)
    assert by_due.order() == ["out of order"]


def test_limits_per_value_are_judged() -> None:
    two = Story().came(A).came(B)
    assert two.shares(2) == 0
    assert two.came(C).shares(2) == 1
    assert two.shares(2, {1: MS - 1}) == 0, "their connection is gone"
    silent = Story().came(A, link=2).came(B).came(C, at_ms=MS + 1)
    assert silent.shares(2) == 0, "the daemon may know that it is gone"
    assert silent.came(A + 9, tenant="u", at_ms=MS + 1, link=2).shares(2) == 1
    assert Story().came(A).came(B).came(C, at_ms=MS - 1).shares(2) == 0, "written before them"
    assert Story().came(A).came(B).sends("nack", A).came(C).shares(2) == 0
    assert Story().came(A).came(B).came(C, tenant="u").shares(2) == 0
    assert Story().came(A).came(B).came(C, at_ms=MS + LEASE_MS).shares(2) == 0
    assert Story().came(A).came(B).came(C, epoch=2).shares(2) == 0
    assert Story().came(A).came(A, 2).came(B).shares(2) == 0, "one task is one"
