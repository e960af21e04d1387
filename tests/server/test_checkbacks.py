"""Who is asked about a transaction that nobody decides: its owner, other members, never a stranger.

Over TCP, with tokens; what is asked when is the model's, ``test_transactions_model``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.access.access_rig import AccessRig
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.model.kinds import Reach, TransactionState

DAY_MS = 86_400_000
CHECK_MS, CHECKS_MAX = 1_000, 3


@pytest.fixture
async def rig() -> AsyncIterator[AccessRig]:
    rig = AccessRig(
        transaction_check_s=1, transaction_check_every_s=1, transaction_checks_max=CHECKS_MAX
    )
    await rig.start()
    yield rig
    await rig.stop()


async def of(rig: AccessRig, name: str, *scopes: str) -> str:
    return await rig.token(*(scopes or ("produce=mails,orders",)), name=name)


async def prepared(rig: AccessRig, token: str, *names: str, topic: str = "mails") -> None:
    """By a connection that is gone then."""
    peer = await rig.peer(token=token)
    for name in names:
        answer = await peer.call(T.PREPARE, name, "payments", 1, [(topic, b"", DAY_MS)], None)
        assert answer[0] == T.OK, answer
    peer.lose()


async def member(rig: AccessRig, token: str) -> Peer:
    peer = await rig.peer(token=token)
    assert (await peer.call(T.CHECKS, ("payments",)))[0] == T.OK
    await rig.settle()
    return peer


async def asked(rig: AccessRig, peer: Peer) -> list[Any]:
    """(transaction, the how manieth time) of the questions that came."""
    await rig.settle()
    frames = [frame for frame in peer.frames() if frame[0] == T.CHECK]
    return [(item[0], item[3]) for frame in frames for item in frame[2]]


async def times_to_ask(rig: AccessRig, count: int) -> None:
    for _ in range(count):
        rig.pass_time(CHECK_MS)
        await rig.settle()


def row(rig: AccessRig, name: str = "x") -> Any:
    return rig.core.transaction_registry.by_name[name].row


async def test_another_tokens_member_does_not_change_checkbacks(rig: AccessRig) -> None:
    """However often it says that it answers for the group."""
    shop, stranger = await of(rig, "shop"), await of(rig, "stranger", "produce=junk,orders")
    await prepared(rig, shop, "x")
    await times_to_ask(rig, 1)
    before = row(rig)
    assert (before.checks, before.asked) == (1, 0)
    one = await member(rig, stranger)
    for _ in range(CHECKS_MAX * 2):
        assert (await one.call(T.CHECKS, ("payments",)))[0] == T.OK
        other = await member(rig, stranger)
        other.lose()
    assert await asked(rig, one) == []
    assert row(rig) == before
    ours = await member(rig, shop)
    assert await asked(rig, ours) == [("x", 1)], "at once"
    assert await asked(rig, one) == []


@pytest.mark.parametrize("times", [1, CHECKS_MAX + 1])
async def test_a_returning_owner_is_asked_at_once(rig: AccessRig, times: int) -> None:
    """Also when somebody was there to be asked at first."""
    shop = await of(rig, "shop")
    first = await member(rig, shop)
    await prepared(rig, shop, "x")
    if times > CHECKS_MAX:
        await times_to_ask(rig, 1)
        assert await asked(rig, first) == [("x", 1)]
        times -= 1
    first.lose()
    await times_to_ask(rig, times)
    is_parked = row(rig).state is TransactionState.PARKED
    assert is_parked == (times >= CHECKS_MAX)
    second = await member(rig, shop)
    assert [name for name, _ in await asked(rig, second)] == ["x"]
    assert row(rig).state is TransactionState.OPEN
    await times_to_ask(rig, 1)
    assert [name for name, _ in await asked(rig, second)] == ["x"], "and then every second"


async def test_a_transactions_owner_is_asked_before_others(rig: AccessRig) -> None:
    shop, also = await of(rig, "shop"), await of(rig, "also", "produce=*")
    other = await member(rig, also)
    await prepared(rig, shop, "x", "y")
    await times_to_ask(rig, 1)
    assert sorted(await asked(rig, other)) == [("x", 1), ("y", 1)], "nobody nearer is there"
    assert row(rig).reached is Reach.ANOTHER
    ours = await member(rig, shop)
    assert sorted(await asked(rig, ours)) == [("x", 1), ("y", 1)], "at once, all the same"
    assert (row(rig).checks, row(rig).asked) == (1, 1)
    await times_to_ask(rig, 1)
    assert len(await asked(rig, ours)) == 2 and await asked(rig, other) == []


async def test_adding_tasks_does_not_make_an_owner(rig: AccessRig) -> None:
    shop, also = await of(rig, "shop"), await of(rig, "also", "produce=*")
    await prepared(rig, shop, "x")
    adding, ours = await member(rig, also), await member(rig, shop)
    half = [("orders", b"", DAY_MS)]
    assert (await adding.call(T.PREPARE, "x", "payments", 2, half, None))[0] == T.OK
    await times_to_ask(rig, 1)
    assert await asked(rig, adding) == []
    assert await asked(rig, ours) == [("x", 1)]


async def test_a_member_that_does_not_read_is_asked_later(rig: AccessRig) -> None:
    shop = await of(rig, "shop")
    ours = await member(rig, shop)
    await prepared(rig, shop, "x")
    caller = next(item for item in rig.shard.callers if rig.shard.checkbacks.groups_of(item))
    operations = rig.operations
    operations.blocked(caller)
    await times_to_ask(rig, 1)
    assert (row(rig).checks, row(rig).asked) == (1, 0)
    operations.unblocked(caller)
    assert await asked(rig, ours) == [("x", 1)]


async def test_a_member_joining_during_the_commit_is_asked(rig: AccessRig) -> None:
    shop = await of(rig, "shop")
    await prepared(rig, shop, "x")
    rig.store.stall()
    await times_to_ask(rig, 1)
    ours = await rig.peer(token=shop)
    number = ours.send(T.CHECKS, ("payments",))
    await rig.settle()
    rig.store.go_on()
    await ours.answer(number)
    assert await asked(rig, ours) == [("x", 1)]


async def test_a_clock_set_back_does_not_stop_checkbacks(
    rig: AccessRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = await of(rig, "shop")
    ours = await member(rig, shop)
    await prepared(rig, shop, "x")
    now_ms = rig.sources.wall_ms
    monkeypatch.setattr(rig.sources, "wall_ms", lambda: now_ms() - 7_200_000)
    await prepared(rig, shop, "y")
    await times_to_ask(rig, 1)
    assert sorted(await asked(rig, ours)) == [("x", 1), ("y", 1)]
    await times_to_ask(rig, 1)
    assert sorted(await asked(rig, ours)) == [("x", 2), ("y", 2)]
