"""The operations without any socket: a second transport, and the table of rights."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import Peer, ShardRig, started
from support.waiting import soon
from tickwheel.api.frames import FrameType as T
from tickwheel.api.verbs import VERBS
from tickwheel.engine.sessions import StoredAnswer
from tickwheel.engine.topics import Item
from tickwheel.errors import TickwheelError
from tickwheel.protocol import encode
from tickwheel.server.shard.callers import Caller
from tickwheel.server.shard.operations import Operations, ShardInterface, StandbyOperations


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


async def test_operations_work_without_a_socket(rig: ShardRig) -> None:
    operations, verbs = rig.operations, rig.operations.verbs
    peer = InMemory(operations)
    verbs.subscribe(peer.caller, 1, 7, "t", "g", 10, {}, peer, rig.shard.clock.read())
    made = {"adopted": 0, "idle": {}}
    assert await peer.answers.get() == (1, {"lease_ms": 30_000, "new_group": made})
    verbs.enqueue(peer.caller, 2, 0, (("t", b"now", 0),), rig.shard.clock.read())
    operations.handled()
    request, task_id, count = await peer.answers.get()
    assert (request, count) == (2, 1)
    epoch, [(row, attempt, _)] = await peer.deliveries.get()
    assert (row.id, row.body, attempt) == (task_id, b"now", 1)
    verbs.ack(peer.caller, 3, "t", "g", epoch, (task_id,), (attempt,))
    operations.handled()
    assert await peer.answers.get() == (3, None)
    assert rig.core.tasks == 0
    operations.closed(peer.caller)
    assert rig.core.subscribers == 0 and not rig.shard.callers


async def test_invalid_requests_raise_an_error_of_the_table(rig: ShardRig) -> None:
    peer = InMemory(rig.operations)
    with pytest.raises(TickwheelError, match="topic must be 1 to 255") as raised:
        rig.operations.verbs.enqueue(
            peer.caller, 1, 0, (("no topic!", b"", 0),), rig.shard.clock.read()
        )
    assert raised.value.code == "bad_request"
    assert peer.answers.empty()


async def test_a_pull_of_an_empty_group_ends_at_its_wait(rig: ShardRig) -> None:
    peer = InMemory(rig.operations)
    rig.operations.verbs.pull(peer.caller, 1, "t", "g", 1, 0, {}, peer, rig.shard.clock.read())
    request, (epoch, _, items) = await soon(peer.answers.get())
    assert (request, epoch, items) == (1, rig.shard.epoch, ())
    assert peer.caller.pulls == {}


async def test_every_operation_is_in_the_table_of_rights(rig: ShardRig) -> None:
    assert set(vars(rig.operations.verbs)) == {*VERBS, "plain_tasks", "unreadable"}


async def test_every_operation_takes_the_request_of_its_verb(rig: ShardRig) -> None:
    for name, verb in VERBS.items():
        if not verb.has_custom_arguments:
            [taken] = inspect.signature(getattr(rig.operations.verbs, name)).parameters.values()
            assert taken.annotation == f"Call[{verb.request_type.__name__}]", name


def test_a_standby_has_the_same_conversation_and_fewer_verbs() -> None:
    shared = {name for name in dir(ShardInterface) if not name.startswith("_")} - {
        "verbs",
        "directory",
    }
    standby = {name for name in dir(StandbyOperations) if not name.startswith("_")}
    assert standby >= shared
    assert standby & set(VERBS) == {"ping", "status", "leave", "nodes"}


# --- resends, and what is none -------------------------------------------------------------------

FAR_MS = 3_600_000
FIRST = (("t", b"one", FAR_MS, {"key": "a"}), ("t", b"two", FAR_MS))
OTHERS: dict[str, tuple[Any, ...]] = {
    "one task less": FIRST[:1],
    "one task more": (*FIRST, FIRST[1]),
    "another topic": (FIRST[0], ("u", b"two", FAR_MS)),
    "another key": (("t", b"one", FAR_MS, {"key": "b"}), FIRST[1]),
    "another body": (FIRST[0], ("t", b"three", FAR_MS)),
    "another order": FIRST[::-1],
}
AFTER_ALL: dict[str, tuple[Any, ...]] = {
    "another delay": (FIRST[0], ("t", b"two", FAR_MS + 1)),
    "another option": (FIRST[0], ("t", b"two", FAR_MS, {"tag": "x"})),
}


@pytest.mark.parametrize("other", {**OTHERS, **AFTER_ALL})
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_part_of_a_transaction_is_recognised_by_its_tasks(
    tmp_path: Path, other: str, restarted: bool
) -> None:
    more = {**OTHERS, **AFTER_ALL}[other]
    traced = (FIRST[0], ("t", b"two", FAR_MS, {"trace": f"00-{1:032x}-{1:016x}-01"}))
    async with InProcess(tmp_path) as daemon:
        peer, store = daemon.connect(), daemon.store
        await daemon.ask(peer, T.PREPARE, "order-9", "pay", 1, FIRST, None)
        if not restarted:
            await _resent(daemon, peer, more, traced)
    if restarted:
        async with InProcess(tmp_path, store=store) as daemon:
            await _resent(daemon, daemon.connect(), more, traced)


async def _resent(daemon: InProcess, peer: Peer, more: Any, traced: Any) -> None:
    daemon.pass_time(700)
    for same in (FIRST, traced):
        await daemon.ask(peer, T.PREPARE, "order-9", "pay", 1, same, None)
    for tasks, options in ((more, None), (FIRST, {"from": "commit"})):
        code, text = await peer.refused(T.PREPARE, "order-9", "pay", 1, tasks, options)
        assert code == "conflict" and "part 1 of transaction order-9 was already sent with" in text
    _, ids, *_ = await daemon.ask(peer, T.COMMIT, "order-9")
    assert len(ids) == len(FIRST)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_resend_is_recognised_by_its_tasks(
    rig: ShardRig, other: str, is_durable: bool
) -> None:
    session = b"s" * 16
    peer, again = await rig.peer(session=session), await rig.peer(session=session)
    if not is_durable:
        rig.store.stall()
    tasks = tuple((*task[:2], 1_000, *task[3:]) for task in FIRST)  # soon: they stay in memory
    number = peer.send(T.ENQUEUE, 0, tasks)
    first = await peer.answer(number) if is_durable else None
    more = tuple((*task[:2], 1_000, *task[3:]) for task in OTHERS[other])
    again.feed(encode((int(T.ENQUEUE), number, 0, more)))
    if is_durable and other == "another body":  # which may have been replaced since
        assert await again.answer(number) == first
        return
    refused = await again.answer(number)
    assert refused[2] == "conflict" and f"request {number} of this session" in refused[3]
    rig.store.go_on()
    again.feed(encode((int(T.ENQUEUE), number, 0, tasks)))
    assert (await again.answer(number))[2] == (first or await peer.answer(number))[2]


async def test_a_resend_of_columns_is_recognised_by_its_tasks(rig: ShardRig) -> None:
    session = b"s" * 16
    peer, again = await rig.peer(session=session), await rig.peer(session=session)
    number = peer.send(T.ENQUEUE_COLUMNS, 0, "t", (b"one", b"two"), 1_000)
    first = await peer.answer(number)
    for topic, bodies, word in (("t", (b"one",), "conflict"), ("u", (b"one", b"two"), "conflict")):
        again.feed(encode((int(T.ENQUEUE_COLUMNS), number, 0, topic, bodies, 1_000)))
        assert (await again.answer(number))[2] == word
    again.feed(encode((int(T.ENQUEUE_COLUMNS), number, 0, "t", (b"one", b"two"), 1_000)))
    assert (await again.answer(number))[2] == first[2]
