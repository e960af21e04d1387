"""The operations without any socket: a second transport, and the table of rights."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import pytest

from support.shard_rig import ShardRig, started
from support.waiting import soon
from tickwheel.api.verbs import VERBS
from tickwheel.engine.sessions import StoredAnswer
from tickwheel.engine.topics import Item
from tickwheel.errors import TickwheelError
from tickwheel.server.shard.callers import Caller
from tickwheel.server.shard.operations import Operations, StandbyOperations

BORDER = {"begin", "contain", "survive", "fail"}
ABOUT_A_CALLER = {
    "opened", "join", "heard", "blocked", "unblocked", "closed", "finished", "is_behind", "handled",
    "after_all", "mistake", "greeting", "unreadable",
}  # fmt: skip


class InMemory:
    """A transport of queues: a whole one."""

    label = "in memory"

    def __init__(self, operations: Operations) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.deliveries: asyncio.Queue[tuple[int, Sequence[Item]]] = asyncio.Queue()
        self.caller = Caller(self)
        operations.opened(self.caller)

    def accepted(self, outcomes: Sequence[StoredAnswer]) -> None:
        for request, first, count, _ in outcomes:
            self.answers.put_nowait((request, first, count))

    def answer_to(self, request: int, value: object) -> tuple[int, object]:
        return request, value

    def give(self, answer: Any) -> None:
        self.answers.put_nowait(answer)

    def error(self, request: int, code: str, message: str) -> None:
        self.answers.put_nowait((request, code, message))

    def flush(self) -> None: ...

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        self.deliveries.put_nowait((epoch, items))

    def check(self, item: Item) -> None: ...

    def ended(self, code: str, message: str) -> None:
        self.answers.put_nowait((code, message))

    def closed(self) -> None: ...


rig = started(ShardRig)


async def test_a_second_transport_needs_no_socket(rig: ShardRig) -> None:
    operations = rig.operations
    peer = InMemory(operations)
    operations.subscribe(peer.caller, 1, 7, "t", "g", 10, {}, peer, rig.shard.clock.read())
    assert await peer.answers.get() == (1, {"lease_ms": 30_000})
    operations.enqueue(peer.caller, 2, 0, (("t", b"now", 0),), rig.shard.clock.read())
    operations.handled()
    request, task_id, count = await peer.answers.get()
    assert (request, count) == (2, 1)
    epoch, [(row, attempt, _)] = await peer.deliveries.get()
    assert (row.id, row.body, attempt) == (task_id, b"now", 1)
    operations.ack(peer.caller, 3, "t", "g", epoch, (task_id,), (attempt,))
    operations.handled()
    assert await peer.answers.get() == (3, None)
    assert rig.core.tasks == 0
    operations.closed(peer.caller)
    assert rig.core.subscribers == 0 and not rig.shard.callers


async def test_what_is_wrong_is_raised_from_the_error_table(rig: ShardRig) -> None:
    peer = InMemory(rig.operations)
    with pytest.raises(TickwheelError, match="topic must be 1 to 255") as raised:
        rig.operations.enqueue(peer.caller, 1, 0, (("no topic!", b"", 0),), rig.shard.clock.read())
    assert raised.value.code == "bad_request"
    assert peer.answers.empty()


async def test_a_pull_of_an_empty_group_is_answered_when_its_time_is_over(rig: ShardRig) -> None:
    peer = InMemory(rig.operations)
    rig.operations.pull(peer.caller, 1, "t", "g", 1, 0, {}, peer, rig.shard.clock.read())
    request, (epoch, _, items) = await soon(peer.answers.get())
    assert (request, epoch, items) == (1, rig.shard.epoch, ())
    assert peer.caller.pulls == {}


async def test_every_operation_is_in_the_table_of_rights(rig: ShardRig) -> None:
    names = {name for name, _ in inspect.getmembers(rig.operations, callable)}
    verbs = {name for name in names if not name.startswith("_")} - BORDER - ABOUT_A_CALLER
    assert verbs == set(VERBS)


def test_a_standby_has_the_same_conversation_and_fewer_verbs() -> None:
    names = {name for name in dir(StandbyOperations) if not name.startswith("_")}
    assert names >= BORDER | ABOUT_A_CALLER
    assert names & set(VERBS) == {"ping", "status", "leave", "nodes"}
