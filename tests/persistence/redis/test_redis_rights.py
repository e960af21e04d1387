"""The rights that a user of Redis needs: the documented ones suffice, and each is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from persistence.store_subject import OWNER, Subject
from support.redis_server import RedisServer
from support.store_rows import ended, everything, in_flight, tasks
from tickwheel.model.kinds import Effects
from tickwheel.persistence.contract import Claim, Leader, NodeRecord, StoreError, StoreUnusable
from tickwheel.persistence.redis import RedisOptions, RedisStore, opening, options_from
from tickwheel.persistence.redis.store import RedisElection, RedisNodes

ROOT = Path(__file__).parents[3]
S = "{tw:default:0}"
CLAIM = Claim(0, 1, "tcp://here:2", 0, "")


def documented() -> list[str]:
    text = (ROOT / "docs/operations.md").read_text()
    (rule,) = re.findall(r"^ACL SETUSER (tickwheel .*)$", text, re.MULTILINE)
    return str(rule).split()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis").start()
    try:
        allow(made)
        yield made
    finally:
        made.kill()


def allow(server: RedisServer, *without: str) -> None:
    user, *rules = documented()
    kept = [rule for rule in rules if rule.removeprefix("+") not in without]
    assert server.call("ACL", "SETUSER", user, "reset", *kept) == b"+OK\r\n"


def options(server: RedisServer, query: str = "", db: int = 0) -> RedisOptions:
    url = server.url(query, "tickwheel:SECRET@").replace("/0", f"/{db}")
    return options_from(url)


def test_every_command_of_a_script_is_tried() -> None:
    folder = ROOT / "tickwheel/persistence/redis"
    paths = [*folder.glob("*.py"), *folder.glob("lua/*.lua")]
    text = "".join(path.read_text() for path in paths if not path.name.startswith("nodes"))
    named = set(re.findall(r"redis\.call\('([A-Z]+)'", text)) | {"ZADD", "HSET", "HDEL", "ZREM"}
    assert len(named) > 20
    assert {name.lower() for name in named} <= set(opening.COMMANDS)
    outside = set(re.findall(r"\b(?:call|pairs)\(\s*\"([A-Z]+)\"", text)) - {"AUTH", "SENTINEL"}
    allowed = {name.partition("|")[0] for name in (*opening.OUTSIDE, *opening.COMMANDS)}
    assert {name.lower() for name in outside} <= allowed


async def test_the_documented_node_rights_suffice(server: RedisServer) -> None:
    (more,) = re.findall(
        r"`(~\{tw:default:nodes\}:\*[^`]*)`", (ROOT / "docs/operations.md").read_text()
    )
    server.call("ACL", "SETUSER", "tickwheel", *more.split())
    server.call("ACL", "LOG", "RESET")
    registry = RedisNodes(options(server), 2)
    me = NodeRecord("a", "run", "tcp://here:1", "0.1.0", 1.0, 0, 3_000, claims=(CLAIM,))
    assert list((await registry.beat(me)).nodes) == ["a"]
    await registry.place(0, "a")
    await registry.place(0, None)
    await registry.drain("a", draining=True)
    await registry.drain("a", draining=False)
    await registry.leave(me)
    await registry.close()
    assert server.call("ACL", "LOG") == b"*0\r\n", "nothing was asked for that is not allowed"


@pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
async def test_the_documented_rights_suffice(
    server: RedisServer, driver: str, tmp_path: Path
) -> None:
    server.call("ACL", "LOG", "RESET")
    chosen = options(server, f"driver={driver}", db=3)
    administration = opening.RedisAdministration(chosen)
    await administration.lay_out(await administration.look(), 0, watch_s=0)
    election, me = RedisElection(chosen, 3_000), Leader(OWNER, "tcp://here:1", 0, 0)
    await election.prepare()
    assert await election.acquire(me)
    assert await election.renew(me)
    subject = Subject(RedisStore(chosen))
    await subject.open()
    await subject.commit(everything())
    await subject.commit(tasks(range(10_000, 16_000)))
    await subject.commit(Effects(progress={(10_000, "g"): in_flight(10_000, "g")}))
    await subject.commit(ended([10_000]))
    assert await subject.store.probe_room()
    await subject.store.backup(str(tmp_path / "copy.db"))
    await subject.store.close(clean=True)
    await subject.open()
    assert [handles async for handles in subject.store.recover_handles()]
    await subject.store.recover_small()
    await subject.store.close(clean=True)
    await election.release(me)
    await election.close()
    assert server.call("ACL", "LOG") == b"*0\r\n", "nothing was asked for that is not allowed"


@pytest.mark.parametrize("command", opening.COMMANDS)
async def test_a_missing_right_is_named_before_writing(server: RedisServer, command: str) -> None:
    allow(server, command)
    with pytest.raises(StoreUnusable, match=f"(?i)tickwheel.*{command}|{command}.*command"):
        await RedisStore(options(server)).open(OWNER, 0)
    assert server.call("KEYS", "*") == b"*0\r\n"


async def test_all_missing_rights_are_named_with_the_acl_command(server: RedisServer) -> None:
    allow(server, "zadd", "hset", "memory|usage", "wait")
    message = (
        "user 'tickwheel' has no right to run hset, zadd; ACL SETUSER tickwheel \\+hset \\+zadd"
    )
    with pytest.raises(StoreUnusable, match=message):
        await RedisElection(options(server), 3_000).prepare()
    allow(server, "memory|usage", "wait")
    with pytest.raises(StoreUnusable, match="wait"):
        await RedisStore(options(server, "wait_replicas=1")).open(OWNER, 0)
    store = RedisStore(options(server))
    await store.open(OWNER, 0)
    await store.close(clean=True)


@pytest.mark.parametrize("command", ["eval", "evalsha", *opening.COMMANDS])
async def test_a_renamed_command_is_named_before_writing(tmp_path: Path, command: str) -> None:
    server = RedisServer(tmp_path / "renamed", rename_command=f"{command} hidden").start()
    try:
        with pytest.raises(StoreUnusable, match=f"(?i)command '?{command}\\b"):
            await RedisElection(options_from(server.url()), 3_000).prepare()
        assert server.call("KEYS", "*") == b"*0\r\n"
    finally:
        server.kill()


@pytest.mark.parametrize("command", ["evalsha", "time", "hgetall", "del"])
async def test_a_node_names_a_renamed_command(tmp_path: Path, command: str) -> None:
    server = RedisServer(tmp_path / "renamed", rename_command=f"{command} hidden").start()
    nodes = RedisNodes(options_from(server.url()), 2)
    me = NodeRecord("a", "run", "tcp://here:1", "0.1.0", 1.0, 0, 3_000, claims=(CLAIM,))
    try:
        with pytest.raises(StoreUnusable, match=f"(?i)'{command}'"):
            await nodes.beat(me)
    finally:
        await nodes.close()
        server.kill()


async def test_a_node_waits_for_a_revoked_right(server: RedisServer) -> None:
    server.call("ACL", "SETUSER", "tickwheel", "~{tw:default:nodes}:*", "+@all")
    nodes = RedisNodes(options(server), 2)
    me = NodeRecord("a", "run", "tcp://here:1", "0.1.0", 1.0, 0, 3_000, claims=(CLAIM,))
    await nodes.beat(me)
    server.call("ACL", "SETUSER", "tickwheel", "-time")
    with pytest.raises(StoreError, match="'TIME'") as refused:
        await nodes.beat(me)
    assert not isinstance(refused.value, StoreUnusable)
    server.call("ACL", "SETUSER", "tickwheel", "+time")
    await nodes.beat(me)
    await nodes.close()


async def test_a_right_revoked_later_is_named(server: RedisServer) -> None:
    election = RedisElection(options(server), 3_000)
    await election.prepare()
    me = Leader(OWNER, "tcp://here:1", 0, 0)
    allow(server, "pexpire")
    assert await election.acquire(me)
    with pytest.raises(StoreError, match="'PEXPIRE'"):
        await election.renew(me)
    allow(server)
    assert await election.renew(me)
    allow(server, "evalsha")
    with pytest.raises(StoreError, match="'evalsha'"):
        await election.renew(me)
    await election.close()


async def test_keys_of_another_shard_are_not_enough(server: RedisServer) -> None:
    with pytest.raises(StoreUnusable, match="keys.*ACL"):
        await RedisStore(options(server, "shard=1")).open(OWNER, 0)


async def test_a_full_server_is_not_reported_as_a_missing_right(server: RedisServer) -> None:
    server.call("CONFIG", "SET", "maxmemory", "1")
    election = RedisElection(options(server), 3_000)
    await election.prepare()
    await election.close()
    server.call("CONFIG", "SET", "maxmemory", "0")
    server.call("SET", f"{S}:scratch", "theirs")
    with pytest.raises(StoreUnusable, match="scratch belongs to another program"):
        await RedisStore(options(server)).open(OWNER, 0)
