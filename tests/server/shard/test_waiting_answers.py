"""Answers that wait for a store that stands still: what they take in memory is what they count."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from support.shard_rig import Peer, ShardRig, started
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import encode
from tickwheel.server.shard.committer import REPLY_BYTES

DAY_MS = 86_400_000
BYTES_MAX = 100_000
TASKS = 200
DELAYS_MS = tuple(range(100_000, 100_500))

Ask = Callable[[list[int], int], tuple[T, tuple[Any, ...]]]
KINDS: dict[str, Ask] = {
    "lookup": lambda ids, n: (T.LOOKUP, (ids[:50],)),
    "list": lambda ids, n: (T.LIST, ({"limit": 50},)),
    "reschedule": lambda ids, n: (T.RESCHEDULE, (ids, {"delay_ms": DAY_MS + n})),
    "unknown": lambda ids, n: (T.RUN_NOW, (list(range(1, TASKS)),)),
    "nack": lambda ids, n: (T.NACK, ("t", "g", [(i, 1, 1, None, None) for i in ids])),
    "stats": lambda ids, n: (T.STATS, ()),
    "policies": lambda ids, n: (T.CONFIGURE, ("t", "g", {"retry": table(n)})),
    "nothing": lambda ids, n: (T.PREFETCH, (1, n)),
}
READING = ("lookup", "list", "reschedule")
"""They are answered some time after they were taken."""


def table(n: int) -> dict[str, Any]:
    return {"kind": "table", "delays_ms": (n, *DELAYS_MS), "retries": 5}


rig = started(lambda: ShardRig(replies_bytes_max=BYTES_MAX))


async def stalled(rig: ShardRig) -> tuple[Peer, list[int]]:
    """A peer that has asked for something that the store does not take, and tasks of before."""
    peer = await rig.peer()
    await peer.call(T.SUBSCRIBE, 1, "t", "g", 1, None)
    ids = (await peer.enqueue(*[("t", b"x", DAY_MS)] * TASKS))[2][1]
    rig.store.stall()
    await rig.settle()
    assert waiting(rig) == []
    (await rig.peer()).send(T.CONFIGURE, "other", None, {"rate": 1.0})
    await rig.until(lambda: rig.core.sealed)
    return peer, list(ids)


def waiting(rig: ShardRig) -> list[Any]:
    """The answers, as they wait."""
    batches = [batch for batch in (rig.core.sealed, rig.core.open) if batch is not None]
    return [answer for batch in batches for answer in batch.replies]


def size(values: Iterable[Any]) -> int:
    """What plain values and all that is in them take in memory, each once."""
    seen: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if id(value) not in seen and isinstance(value, (str, bytes, int, tuple, list, dict)):
            seen[id(value)] = value
            if isinstance(value, dict):
                left += [*value.keys(), *value.values()]
            elif isinstance(value, (tuple, list)):
                left += value
    return sum(map(sys.getsizeof, seen.values()))


@pytest.mark.parametrize("kind", KINDS)
async def test_waiting_answers_use_no_more_memory_than_counted(rig: ShardRig, kind: str) -> None:
    peer, ids = await stalled(rig)
    before, asked = rig.shard.committer.replies_bytes, []
    while peer.transport.reading:
        what, fields = KINDS[kind](ids, len(asked))
        asked.append(peer.send(what, *fields))
        await rig.settle()
        assert len(asked) <= BYTES_MAX // 150 + 2
    answer_bytes = max(size([answer]) for answer in waiting(rig))
    assert 0.9 * BYTES_MAX < size(waiting(rig)) <= 1.1 * BYTES_MAX + answer_bytes
    assert rig.shard.committer.replies_bytes - before <= BYTES_MAX + answer_bytes + REPLY_BYTES
    rig.store.go_on()
    for number in asked:
        assert (await peer.answer(number))[0] == T.OK
    assert rig.shard.committer.replies_bytes == 0


@pytest.mark.parametrize("kind", READING)
async def test_answers_to_requests_in_one_read_are_counted(rig: ShardRig, kind: str) -> None:
    """None of them is answered before all of them are taken."""
    peer, ids = await stalled(rig)
    peer.request, count = 60, 60
    frames = [KINDS[kind](ids, n) for n in range(count)]
    peer.feed(b"".join(encode((int(what), n, *f)) for n, (what, f) in enumerate(frames)))
    await rig.settle(2_000)
    answer_bytes = max(size([answer]) for answer in waiting(rig))
    assert 0.9 * BYTES_MAX < size(waiting(rig)) <= 1.1 * BYTES_MAX + answer_bytes
    rig.store.go_on()
    for number in range(count):
        assert (await peer.answer(number))[0] == T.OK


async def test_a_caller_of_many_requests_does_not_block_others(
    rig: ShardRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else it asks for takes its room again as soon as there is some."""
    busy, ids = await stalled(rig)
    other = await rig.peer()
    commit = rig.store.commit

    async def slow(*given: Any) -> bool:
        await rig.settle(10)
        return await commit(*given)

    monkeypatch.setattr(rig.store, "commit", slow)
    more = [(int(T.CONFIGURE), n, "t", "g", {"retry": table(n)}) for n in range(100, 2_100)]
    busy.feed(encode((int(T.LOOKUP), 50, ids[:1])) + b"".join(map(encode, more)))
    asked = other.send(T.LOOKUP, ids[:1])
    rig.store.go_on()
    assert (await other.answer(asked))[0] == T.OK
    assert rig.held, "the busy one still waits"


async def test_an_unencodable_answer_is_an_internal_error_alone(
    rig: ShardRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, ids = await stalled(rig)
    with monkeypatch.context() as patched:
        moved = lambda topic, found, *_: dict.fromkeys(found, object())  # noqa: E731
        patched.setattr(rig.engine.control, "reschedule_many", moved)
        bad = peer.send(T.RUN_NOW, ids)
        await rig.settle()
    good = [peer.send(T.LOOKUP, ids), peer.send(T.PREFETCH, 1, 2)]
    await rig.settle()
    rig.store.go_on()
    answer = await peer.answer(bad)
    assert answer[:3] == (T.ERROR, bad, "internal")
    assert [(await peer.answer(number))[0] for number in good] == [T.OK, T.OK]
    assert not rig.shard.failed.done()
    assert [event for event, text in rig.notices if f"request {bad} of" in text] == [
        "internal_error"
    ]
