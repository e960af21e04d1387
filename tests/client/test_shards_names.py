"""Names that are unique for the daemon, over several shards: which shard decides, and races."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.shard_rig import Peer
from support.shards import NOW_MS, Shards, alone, key_in
from tickwheel import Client, Task, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.api.verb import Home, Routing, Verb
from tickwheel.api.verbs import VERBS
from tickwheel.gateway import GatewayClient
from tickwheel.model.values import shard_of
from tickwheel.server.access.tokens import create, parse_scopes
from tickwheel.server.shard import following, names
from tickwheel.server.shard.names import CLAIM_KEPT_MS

COUNT, HOUR = 3, 3_600
ROUNDS = 12
NOT_UNIQUE = {
    "enqueue": "ids are the daemon's own",
    "enqueue_columns": "ids are the daemon's own",
    "enqueue_unanswered": "ids are the daemon's own",
    "configure": "settings of what is there; the home decides",
    "delete_group": "of what is there",
    "delete_topic": "of what is there",
    "cancel_bulk": "of what is there",
    "cancel_restore": "of what is there",
    "pause_key": "of what is there, and the same everywhere",
    "resume_key": "of what is there, and the same everywhere",
    "set_push": "the target of a group; the same again mends it",
    "set_forward": "the target of a group; the same again mends it",
    "remove_target": "of what is there",
}
"""Verbs that tell several shards something, and make nothing that goes by a name."""


@pytest.fixture
async def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shards]:
    monkeypatch.setattr(following, "READ_S_MIN", 3_600.0)
    backups = tmp_path / "backups"
    backups.mkdir()
    async with Shards(COUNT, tmp_path, backup_dir=str(backups)) as found:
        yield found


async def ends_of(*asked: Awaitable[Any]) -> list[Any]:
    """What became of requests at once; other than refusals, none may fail."""
    ends = await asyncio.gather(*asked, return_exceptions=True)
    for end in ends:
        refused = (errors.Conflict, errors.IdempotencyKeyReused)
        assert not isinstance(end, BaseException) or isinstance(end, refused), repr(end)
    return ends


def teller(shards: Shards) -> GatewayClient:
    """What asks for the HTTP API of all."""
    result = GatewayClient(shards.urls[0], "", None)
    result._options.open_to = shards._open_to
    shards._stack.push_async_callback(result.close)
    return result


async def pairs_of(shards: Shards) -> list[tuple[Client, str]]:
    """Two programs, and the keys of two shards."""
    one, two = await shards.client(0).connect(), await shards.client(1).connect()
    return [(one, key_in(0, COUNT)), (two, key_in(1, COUNT))]


async def race_for_a_schedule(shards: Shards, pairs: list[tuple[Client, str]]) -> None:
    """Each program puts its schedule when the other has looked for one, or has been refused."""
    are_there = [asyncio.Event() for _ in pairs]
    known = [await client._know_shards() for client, _ in pairs]

    async def put(one: int, name: str) -> None:
        client, key = pairs[one]
        try:
            await client.put_schedule(name, topic="t", every=HOUR, key=key)
        finally:
            are_there[one].set()

    def wait_for_the_other(one: int, ask: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def asked(member: Any, verb: Verb, *rest: Any) -> Any:
            if verb.name == "put_schedule":
                are_there[one].set()
                await are_there[1 - one].wait()
            return await ask(member, verb, *rest)

        return asked

    for one, know in enumerate(known):
        know._ask = wait_for_the_other(one, know._ask)  # type: ignore[union-attr, method-assign]
    for n in range(ROUNDS):
        await ends_of(*(put(one, f"s{n}") for one in range(len(pairs))))
        there = [f"s{n}" in shards.shard(one).core.schedule_heap.by_name for one in range(COUNT)]
        assert sum(there) == 1
        for event in are_there:
            event.clear()


async def race_of_putting_and_deleting(shards: Shards, pairs: list[tuple[Client, str]]) -> None:
    async def change(client: Client, key: str) -> None:
        for _ in range(ROUNDS):
            await ends_of(client.put_schedule("s", topic="t", every=HOUR, key=key))
            there = [
                "s" in shards.shard(number).core.schedule_heap.by_name for number in range(COUNT)
            ]
            assert sum(there) <= 1
            with suppress(errors.NotFound):
                await client.delete_schedule("s")

    third = await shards.client(2).connect(), key_in(2, COUNT)
    await asyncio.gather(*(change(*pair) for pair in (*pairs, third)))


async def race_for_a_transaction(shards: Shards, pairs: list[tuple[Client, str]]) -> None:
    async def begin(client: Client, name: str, key: str) -> None:
        transaction = client.transaction("p", id=name)
        await transaction.enqueue("t", b"1", key=key)
        await transaction.enqueue("t", b"2")

    for n in range(ROUNDS):
        ends = await ends_of(*(begin(client, f"x{n}", key) for client, key in pairs))
        known = [shards.shard(number).core.transaction_registry.by_name for number in range(COUNT)]
        assert [f"x{n}" in item for item in known].count(True) == 1
        assert ends.count(None) >= 1
        client = pairs[0][0]
        assert len(await client.commit_transaction(f"x{n}")) == 2 * ends.count(None)
        with pytest.raises(errors.TransactionCommitted):
            await client.rollback_transaction(f"x{n}")


async def race_for_an_idempotency_key(shards: Shards, pairs: list[tuple[Client, str]]) -> None:
    client = pairs[0][0]
    tellers = [await teller(shards).connect() for _ in pairs]
    for n in range(ROUNDS):
        tasks = [(("once", b"%d" % i, HOUR, {"key": key}),) for i, (_, key) in enumerate(pairs)]
        asked = [
            one.put_once(b"pay-%d" % n, i + 1, some)
            for i, (one, some) in enumerate(zip(tellers, tasks, strict=True))
        ]
        ends = await ends_of(*asked)
        assert [type(end) for end in ends].count(errors.IdempotencyKeyReused) == 1
    assert len([task async for task in client.list_tasks(topic="once")]) == ROUNDS


async def race_for_a_bulk_operation(shards: Shards, pairs: list[tuple[Client, str]]) -> None:
    keys = [key_in(shard, COUNT) for shard in range(COUNT)]
    await pairs[0][0].enqueue_many([Task("t", b"", delay=HOUR, key=key) for key in keys])
    for n in range(ROUNDS):
        asked = (
            client.cancel(topic="t", filter={"tags": tag}, id=f"b{n}")
            for (client, _), tag in zip(pairs, ("b", "c"), strict=True)
        )
        ends = await ends_of(*asked)
        assert [type(end) for end in ends].count(errors.Conflict) == 1
        bulks = [await alone(pairs[0][0], m).show_bulk(f"b{n}") for m in range(COUNT)]
        assert len({str(bulk.selection) for bulk in bulks}) == 1


async def race_for_a_bulk_operation_on_topics(
    shards: Shards, pairs: list[tuple[Client, str]]
) -> None:
    """Each topic is known only in the shard of its tasks."""
    for client, key in pairs:
        await client.enqueue(f"of-{key}", b"", delay=HOUR, key=key)
    for n in range(ROUNDS):
        asked = (
            client.cancel(topic=f"of-{key}", filter={"tags": "none"}, id=f"b{n}")
            for client, key in pairs
        )
        ends = await ends_of(*asked)
        assert [type(end) for end in ends].count(errors.Conflict) == 1
        bulks = [await alone(pairs[0][0], m).show_bulk(f"b{n}") for m in range(COUNT)]
        assert len({bulk.topic for bulk in bulks}) == 1


async def race_for_a_backup(shards: Shards, pairs: list[tuple[Client, str]]) -> None:
    ends = await ends_of(*(client.backup("b.db") for client, _ in pairs))
    assert [type(end) for end in ends].count(errors.Conflict) == 1


async def race_for_a_group(shards: Shards, pairs: list[tuple[Client, str]]) -> None:
    for n in range(ROUNDS):
        ends = await ends_of(*(client.create_group("t", f"g{n}") for client, _ in pairs))
        assert sorted(end.created for end in ends) == [False, True]


Race = Callable[[Shards, list[tuple[Client, str]]], Awaitable[None]]
RACES: dict[str, tuple[Race, ...]] = {
    "put_schedule": (race_for_a_schedule, race_of_putting_and_deleting),
    "prepare": (race_for_a_transaction,),
    "enqueue_once": (race_for_an_idempotency_key,),
    "make_bulk": (race_for_a_bulk_operation, race_for_a_bulk_operation_on_topics),
    "backup": (race_for_a_backup,),
    "create_group": (race_for_a_group,),
}
ELSEWHERE = {
    "restore": "tests/client/test_shards_verbs.py: where one refuses, all are cancelled",
    "reset_group": "tests/client/test_shards_verbs.py: told as a bulk operation is",
}
"""They need a history."""


def test_each_creating_verb_declares_its_home_shard() -> None:
    several = {
        name
        for name, verb in VERBS.items()
        if verb.routing
        in (Routing.BASIS, Routing.TURN, Routing.TOGETHER, Routing.HOME, Routing.HOME_LAST)
    }
    unique = {name for name, verb in VERBS.items() if verb.unique is not None}
    assert several - NOT_UNIQUE.keys() == unique == RACES.keys() | ELSEWHERE.keys()
    for name in unique:
        request, said = VERBS[name].request, VERBS[name].unique
        assert said is not None
        fields = VERBS[name].fields if request is None else [f.name for f in request.fields()]
        assert said.name in fields, name
        assert said.home is not Home.NAME or "conflict" in VERBS[name].errors, name


@pytest.mark.parametrize("race", [item for some in RACES.values() for item in some])
async def test_two_programs_use_a_name_at_once(shards: Shards, race: Race) -> None:
    await race(shards, await pairs_of(shards))


async def test_a_bulk_operation_is_known_in_shards_without_its_topic(shards: Shards) -> None:
    (client, zero), (_, one) = await pairs_of(shards)
    await client.enqueue("first", b"", delay=HOUR, key=zero)
    await client.enqueue("second", b"", delay=HOUR, key=one)
    bulk = await client.cancel(topic="second", filter={}, id="nightly")
    assert (await client.wait_bulk(bulk.id)).changed == 1
    with pytest.raises(errors.Conflict, match="another bulk operation has the id nightly"):
        await client.cancel(topic="first", filter={}, id="nightly")
    assert [task.topic async for task in client.list_tasks()] == ["first"]
    with pytest.raises(errors.NotFound, match="there is no topic none"):
        await client.cancel(topic="none", filter={}, id="typo")
    with pytest.raises(errors.NotFound):
        await client.show_bulk("typo")


# --- a program that stops halfway ----------------------------------------------------------------


async def claimed(shards: Shards, client: Client, of: str, name: str, shard: int) -> int:
    """The number of a claim of which nothing was made."""
    know = await client._know_shards()
    found, number = await know._claim(of, name, "t", shard, None)  # type: ignore[union-attr]
    assert found == shard and number
    return int(number)


def name_in(shard: int) -> str:
    return key_in(shard, COUNT, "n")


async def test_another_program_completes_an_abandoned_claim(shards: Shards) -> None:
    (client, zero), (other, one) = await pairs_of(shards)
    name = name_in(2)
    await claimed(shards, client, "schedule", name, 0)
    assert (await client.put_schedule(name, topic="t", every=HOUR, key=zero)).outcome == "created"
    await claimed(shards, client, "transaction", name, 0)
    async with other.transaction("p", id=name) as transaction:
        await transaction.enqueue("t", b"", key=one)
    assert (await other.show_transaction(name)).state == "committed"


async def test_an_ended_claim_creates_nothing(shards: Shards) -> None:
    (client, _), (other, one) = await pairs_of(shards)
    name = name_in(2)
    number = await claimed(shards, client, "transaction", name, 0)
    await other.transaction("p", id=name).enqueue("t", b"", key=one)
    peer = Peer(shards.insides[0].daemon.listener())  # type: ignore[union-attr]
    await peer.hello()
    late = await peer.call(T.PREPARE, name, "p", 1, (("t", b"", 0),), {"claim": number})
    assert late[0] == T.ERROR and "another client has claimed" in str(late)
    peer.lose()


async def test_a_token_of_other_topics_ends_no_claim(tmp_path: Path) -> None:
    path, texts = tmp_path / "tokens.json", list[str]()
    for name in ("ours", "theirs"):
        grants = parse_scopes([f"produce={name}.*"])
        texts.append(create(path, name, grants, NOW_MS, None)[1])
    async with Shards(COUNT, tokens_file=str(path)) as shards:
        ours, theirs = [await shards.client(token=text).connect() for text in texts]
        name, know = name_in(2), await ours._know_shards()
        assert know is not None
        assert (await know._claim("transaction", name, "ours.a", 0, None))[0] == 0
        with pytest.raises((errors.Conflict, errors.Forbidden)):
            await theirs.transaction("p", id=name).enqueue("theirs.a", b"", key=key_in(1, COUNT))
        await ours.transaction("p", id=name).enqueue("ours.a", b"", key=key_in(0, COUNT))


async def test_abandoned_claims_stay_ended(shards: Shards) -> None:
    (client, _), (other, _) = await pairs_of(shards)
    name, numbers = name_in(2), list[int]()
    for _ in range(2):  # nothing is made of either
        numbers.append(await claimed(shards, client, "schedule", name, 0))
        await claimed(shards, other, "schedule", name, 1)
    assert numbers == sorted(set(numbers))
    know = await client._know_shards()
    assert know is not None
    await claimed(shards, client, "schedule", name, 0)
    verb = VERBS["claim_schedule"]
    for number in numbers:
        late = verb.request_type.to_frame(
            {"name": name, "topic": "t", "shard": 0, "number": number}
        )
        with pytest.raises(errors.Conflict, match="another client has claimed"):
            await know.links[0].call(verb, late, None)


async def test_tasks_without_a_key_follow_the_transaction(shards: Shards) -> None:
    (client, zero), (other, _) = await pairs_of(shards)
    name = name_in(2)
    await client.transaction("p", id=name).enqueue("t", b"", key=zero)
    with pytest.raises(errors.Conflict, match=r"in shard 0.*shard 1"):
        await other.transaction("p", id=name).enqueue("t", b"", key=key_in(1, COUNT))
    transaction = shards.client().transaction("p", id=name)
    transaction._parts = 1
    await transaction.enqueue("t", b"")
    assert (await client.show_transaction(name)).tasks == 2


async def test_a_shard_refuses_names_of_another_home_shard(shards: Shards) -> None:
    name = name_in(2)
    peer = Peer(shards.insides[0].daemon.listener())  # type: ignore[union-attr]
    await peer.hello()
    prepared = await peer.call(T.PREPARE, name, "p", 1, (("t", b"", 0),), None)
    put = await peer.call(T.SCHEDULE_PUT, name, {"topic": "t", "every_ms": 3_600_000})
    for answer in (prepared, put):
        assert answer[0] == T.ERROR and "its name belongs to shard 2" in str(answer)
    peer.lose()


async def test_unused_claims_expire(shards: Shards) -> None:
    (client, zero), _ = await pairs_of(shards)
    name, used = name_in(2), key_in(2, COUNT, "m")
    await claimed(shards, client, "schedule", name, 0)
    await claimed(shards, client, "transaction", name, 0)
    await client.put_schedule(used, topic="t", every=HOUR, key=zero)
    await client.transaction("p", id=used).enqueue("t", b"", key=zero)
    for passed_ms, left in ((CLAIM_KEPT_MS, 4), (CLAIM_KEPT_MS, 2)):
        shards.pass_time(passed_ms)
        looking = shards.shard(2).following
        assert looking is not None
        await looking.end_claims()
        assert len(shards.shard(2).core.claims) == left
    assert {row.name for row in shards.shard(2).core.claims.values()} == {used}


async def test_claimed_names_are_limited(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    (client, _), _ = await pairs_of(shards)
    monkeypatch.setattr(names, "CLAIMS_MAX", 1)
    await claimed(shards, client, "transaction", name_in(2), 0)
    with pytest.raises(errors.Overloaded, match=r"1 names are claimed; the limit is 1"):
        await claimed(shards, client, "transaction", key_in(2, COUNT, "m"), 0)


async def test_an_idempotency_key_works_without_tasks_in_its_home_shard(shards: Shards) -> None:
    one = await teller(shards).connect()
    key = next(k for k in (b"%d" % n for n in range(99)) if shard_of(k.hex(), COUNT) == 0)
    tasks = (("t", b"", HOUR, {"key": key_in(1, COUNT)}), ("t", b"", HOUR, {"key": "k"}))
    first = await one.put_once(key, 7, tasks)
    assert await one.put_once(key, 7, tasks) == first
    for other in range(COUNT):
        with pytest.raises(errors.IdempotencyKeyReused):
            await one.put_once(key, 8, (("t", b"", HOUR, {"key": key_in(other, COUNT)}),))


async def test_a_topics_rule_applies_with_an_order_key_of_another_shard(shards: Shards) -> None:
    client = await shards.client().connect()
    await client.configure("t", if_pending="keep")
    key = key_in(0, COUNT)
    with pytest.raises(errors.BadRequest, match="if_pending.*order_key"):
        await client.enqueue("t", b"", key=key, order_key=key_in(1, COUNT))
    await client.enqueue("t", b"", key=key, order_key=key, delay=HOUR)
    kept = await client.enqueue("t", b"", key=key, delay=HOUR)
    assert kept.outcome == "kept"
