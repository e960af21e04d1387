"""Which of several answers counts when those who are asked for the master do not agree."""

from __future__ import annotations

import asyncio

import pytest

from tickwheel.persistence.on_server import Address, NotConnected
from tickwheel.persistence.redis.connection import Nodes, _DiscoveredPlace
from tickwheel.persistence.redis.driver import RedisOptions, ServerError, options_from

OLD, NEW = Address("old", 1), Address("new", 2)
SILENT = None


class Told(_DiscoveredPlace):
    """Sentinels with scripted answers, in this order."""

    def __init__(self, answers: list[Address | str | None], options: RedisOptions) -> None:
        super().__init__(options)
        self.asked = [Address("s", n) for n in range(len(answers))]
        self._answers = dict(zip(self.asked, answers, strict=True))

    async def _ask(self, one: Address) -> tuple[Address, Address | str]:
        answer = self._answers[one]
        if answer is SILENT:
            await asyncio.Event().wait()
        assert answer is not None
        return one, answer

    async def named(self) -> Address:
        return await self._find_master(self.asked)


def told(*answers: Address | str | None, connect_ms: int = 60_000) -> Told:
    options = options_from(f"redis+cluster://s/?connect_ms={connect_ms}")
    return Told(list(answers), options)


@pytest.mark.parametrize(
    "answers",
    [(NEW,), (NEW, NEW, SILENT), (OLD, NEW, NEW), (NEW, "refused", "refused"), (SILENT, NEW, NEW)],
)
async def test_a_majority_of_sentinels_decides(answers: tuple[Address | str | None, ...]) -> None:
    async with asyncio.timeout(20):  # far below what is waited for the silent ones
        assert await told(*answers).named() == NEW


async def test_the_most_frequent_timely_answer_decides() -> None:
    assert await told(NEW, SILENT, SILENT, connect_ms=20).named() == NEW
    assert await told(OLD, NEW, NEW, SILENT, SILENT, connect_ms=20).named() == NEW


async def test_a_tie_is_decided_for_the_newer_master() -> None:
    asked = told(OLD, NEW, "refused")
    asked._last = OLD
    assert await asked.named() == NEW
    asked._last = NEW
    assert await asked.named() == OLD, "the one before did not prove to be it"


async def test_no_answer_names_all_reasons() -> None:
    asked = told("refused", SILENT, "knows no master", "refused", connect_ms=300)
    with pytest.raises(NotConnected, match="s:0: refused; s:1: no answer; s:2: knows.*and 1 more"):
        await asked.named()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12182 10.0.0.7:7001", Address("10.0.0.7", 7001)),
        ("12182 ::1:7001", Address("::1", 7001)),
        ("12182 node.example:7001", Address("node.example", 7001)),
        ("12182 :7001", Address("here", 7001)),
        ("12182 ?:7001", Address("here", 7001)),
        ("of another kind", None),
    ],
)
def test_moved_errors_name_the_new_node(text: str, expected: Address | None) -> None:
    nodes = Nodes(options_from("redis+cluster://here/"))
    nodes._last = Address("here", 7000)
    nodes.note_redirect(ServerError("READONLY", "x y:1"))
    assert nodes._hint is None
    nodes.note_redirect(ServerError("MOVED", text))
    assert nodes._hint == expected
