"""Groups and settings: what is asked, what is made of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon
from support.waiting import soon
from tickwheel import Client, Retry, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.api.groups import GroupHeld, TopicHeld
from tickwheel.api.shapes import reader_of
from tickwheel.client import GroupSettings, HeldKey, KeyLine, KeyPause, PausedKey

SETTINGS: dict[str, Any] = {
    "topic": "t", "group": "g", "paused": False, "rate": 5.0, "burst": 10,
    "retry": {"kind": "fixed", "delay_ms": 5, "retries": 1, "jitter": 0.0},
}  # fmt: skip


LINES: dict[str, Any] = {
    "order_retry": 0.05, "order_attempts": 3, "order_failure": "hold", "fair_by": "tenant",
    "limit_each": 5, "rate_each": 2.5,
}  # fmt: skip
LINES_WIRE = {"order_retry_ms": 50} | {n: v for n, v in LINES.items() if n != "order_retry"}


async def asked(
    kind: T, answer: Any, call: Callable[[Client], Coroutine[Any, Any, Any]]
) -> tuple[Any, Any]:
    """(fields sent, result)"""
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        asking = asyncio.ensure_future(call(client))
        frame = await peer.next(kind)
        peer.ok(frame, answer)
        return frame[2:], await soon(asking)


async def test_a_group_is_made() -> None:
    at = datetime.fromtimestamp(NOW_MS / 1000, UTC)
    for options, wire in (
        ({}, {"since": "now"}),
        ({"start": "first"}, {"since": "first"}),
        ({"start": at, "paused": True}, {"since": NOW_MS, "paused": True}),
        (
            {"retry": Retry.none(), "rate": 5, "burst": 2},
            {"since": "now", "retry": {"kind": "none"}, "rate": 5.0, "burst": 2},
        ),
        (
            {"tags": "eu || us", "where": "n > 1"},
            {"since": "now", "tags": "eu || us", "where": "n > 1"},
        ),
        (LINES, {"since": "now", **LINES_WIRE}),
    ):
        sent, found = await asked(
            T.GROUP_CREATE,
            SETTINGS | {"created": True},
            lambda client, o=options: client.create_group("t", "g", **o),
        )
        assert sent == ("t", "g", wire)
        assert isinstance(found, GroupSettings)
        assert (found.topic, found.group, found.paused, found.rate, found.burst) == (
            *("t", "g", False, 5.0, 10),
        )
        assert found.retry == Retry.fixed(0.005, 1)
        assert found.created


async def test_only_what_is_named_is_changed() -> None:
    topic = {"topic": "t", "group": None, "paused": True, "rate": None, "burst": None}
    for call, group, wire in (
        (lambda c: c.configure("t"), None, {}),
        (lambda c: c.configure("t", "g", rate=1.5), "g", {"rate": 1.5}),
        (lambda c: c.configure("t", rate=None, burst=None), None, {"rate": None, "burst": None}),
        (lambda c: c.configure("t", "g", retry=None), "g", {"retry": None}),
        (lambda c: c.configure("t", retry=Retry.named("x")), None, {"retry": "x"}),
        (lambda c: c.configure("t", paused=False, burst=3), None, {"paused": False, "burst": 3}),
        (lambda c: c.pause("t"), None, {"paused": True}),
        (lambda c: c.resume("t", "g"), "g", {"paused": False}),
    ):
        sent, found = await asked(T.CONFIGURE, topic | {"retry": None}, call)
        assert sent == ("t", group, wire)
        assert (found.group, found.paused, found.retry, found.created) == (None, True, None, False)


async def test_a_group_is_deleted_with_the_counts_of_what_it_held() -> None:
    held = {"ready": 1, "in_flight": 2, "waiting": 3, "dead": 4}
    sent, found = await asked(
        T.GROUP_DELETE, held, lambda client: client.delete_group("t", "g", force=True)
    )
    assert sent == ("t", "g", True)
    assert found == GroupHeld(**held)


async def test_a_group_that_holds_something_is_kept() -> None:
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        asking = asyncio.ensure_future(client.delete_group("t", "g"))
        frame = await peer.next(T.GROUP_DELETE)
        assert frame[4] is False
        peer.error(frame, "conflict", "it holds 3 ready")
        with pytest.raises(errors.Conflict, match="3 ready"):
            await soon(asking)


async def test_a_deletion_whose_answer_is_lost_is_not_repeated() -> None:
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        asking = asyncio.ensure_future(client.delete_group("t", "g"))
        await peer.next(T.GROUP_DELETE)
        peer.close()
        with pytest.raises(errors.ConnectionLost):
            await soon(asking)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.create_group("t", "g", start="yesterday"), ("start", "'yesterday'")),
        (lambda c: c.create_group("t", "g", start=datetime(2030, 1, 1)), ("start", "zone")),  # noqa: DTZ001
        (lambda c: c.create_group("t", "g", rate=0), ("rate", "0")),
        (lambda c: c.create_group("t", "g", burst=0), ("burst", "0")),
        (lambda c: c.create_group("t", "g", paused=1), ("paused", "1")),
        (lambda c: c.create_group("t", "a b"), ("group", "'a b'")),
        (lambda c: c.create_group("t", None), ("group", "None")),
        (lambda c: c.delete_group("t", None), ("group", "None")),
        (lambda c: c.delete_group("t", "g", force=None), ("force", "None")),
        (lambda c: c.configure(""), ("topic", "''")),
        (lambda c: c.configure("t", rate=float("inf")), ("rate", "inf")),
        (lambda c: c.configure("t", rate=True), ("rate", "True")),
        (lambda c: c.configure("t", burst=1.5), ("burst", "1.5")),
        (lambda c: c.configure("t", paused=None), ("paused", "None")),
        (lambda c: c.configure("t", retry={"kind": "none"}), ("retry", "Retry.fixed")),
    ],
)
async def test_what_is_wrong_is_named_and_not_sent(call: Any, words: tuple[str, ...]) -> None:
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        with pytest.raises(errors.BadRequest) as raised:
            await soon(call(client))
        for word in words:
            assert word in raised.value.message
        assert peer.nothing()


async def test_an_answer_of_the_wrong_shape_is_a_protocol_error() -> None:
    for kind, call in (
        (T.GROUP_CREATE, lambda c: c.create_group("t", "g")),
        (T.CONFIGURE, lambda c: c.configure("t")),
        (T.GROUP_DELETE, lambda c: c.delete_group("t", "g")),
    ):
        for answer in (None, {}, 5, [1]):
            with pytest.raises(errors.ProtocolError):
                await asked(kind, answer, call)


async def test_dead_letters_are_asked_for_by_time_and_reason() -> None:
    at = datetime.fromtimestamp(NOW_MS / 1000, UTC)

    async def collect(client: Client) -> list[Any]:
        found = client.dead_list(since=at, until=at, reason="timeout")
        return [letter async for letter in found]

    sent, found = await asked(T.DEAD_LIST, {"dead": [], "next": None}, collect)
    assert found == []
    limit = sent[0].pop("limit")
    assert limit > 0
    assert sent[0] == {"since_ms": NOW_MS, "until_ms": NOW_MS, "reason": "timeout"}


async def test_stats_of_groups_and_topics() -> None:
    names = ("ready", "in_flight", "waiting", "dead", "subscribers", "delivered", "acked")
    old_group = dict.fromkeys(names, 1)
    group = old_group | {
        "nacked": 2, "expired": 3, "since_ms": 4, "oldest_ready_ms": 5, "paused": True,
        "rate": 6.5, "burst": 7, "retry": {"kind": "none"},
        "retrying": 1, "replay": {"looked_at": 8, "given": 7, "share": 0.25},
    }  # fmt: skip
    counts = ("pending", "ready", "in_flight", "waiting", "dead", "enqueued", "delivered", "acked")
    plain = dict.fromkeys(counts, 1)
    topic = plain | {
        "oldest_ready_ms": 8, "broadcasters": 9, "paused": False, "rate": None, "burst": None,
        "retry": {"kind": "fixed", "delay_ms": 1, "name": "mine"},
    }  # fmt: skip
    raw = plain | {"dead_total": 10, "dead_expired": 11, "dropped_once": 12}
    raw |= {"topics": {"t": topic | {"groups": {"g": group, "old": old_group}}}}
    _, stats = await asked(T.STATS, raw, lambda client: client.stats())
    assert (stats.dead_total, stats.dead_expired, stats.dropped_once) == (10, 11, 12)
    of_topic = stats.topics["t"]
    assert (of_topic.oldest_ready_ms, of_topic.broadcasters, of_topic.paused) == (8, 9, False)
    assert of_topic.retry is not None and of_topic.retry.name == "mine"
    of_group = of_topic.groups["g"]
    assert (of_group.nacked, of_group.expired, of_group.since_ms) == (2, 3, 4)
    assert (of_group.oldest_ready_ms, of_group.paused, of_group.rate) == (5, True, 6.5)
    assert (of_group.burst, of_group.retry, of_group.retrying) == (7, Retry.none(), 1)
    assert of_group.replay is not None and of_group.replay.share == 0.25
    old = of_topic.groups["old"]
    assert (old.nacked, old.paused, old.rate, old.retry) == (0, False, None, None)
    assert old.replay is None


async def test_a_topic_is_for_broadcasts_only() -> None:
    answer = SETTINGS | {"group": None, "broadcast_only": True}
    sent, found = await asked(
        T.CONFIGURE, answer, lambda client: client.configure("t", broadcast_only=True)
    )
    assert sent == ("t", None, {"broadcast_only": True})
    assert found.broadcast_only
    _, found = await asked(T.CONFIGURE, SETTINGS, lambda client: client.configure("t", rate=5))
    assert not found.broadcast_only


async def test_the_filter_of_a_group_is_set_part_by_part() -> None:
    for options, wire in (
        ({"tags": "eu"}, {"tags": "eu"}),
        ({"where": "n > 1"}, {"where": "n > 1"}),
        ({"tags": None, "where": None}, {"tags": None, "where": None}),
    ):
        sent, found = await asked(
            T.CONFIGURE,
            SETTINGS | {"tags": "eu", "where": "n > 1"},
            lambda client, o=options: client.configure("t", "g", **o),
        )
        assert sent == ("t", "g", wire)
        assert (found.tags, found.where) == ("eu", "n > 1")


@pytest.mark.parametrize("broadcast", [False, True])
async def test_a_consumer_names_the_filter(broadcast: bool) -> None:
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        wanted = {"tags": "eu", "where": "n > 1"}
        pulling = asyncio.ensure_future(client.pull("t", group="g", **wanted))
        frame = await peer.next(T.PULL)
        assert frame[-1] == wanted
        peer.ok(frame, (1, NOW_MS, ()))
        assert await soon(pulling) == []
        subscription = client.subscribe("t", broadcast=broadcast, **wanted)
        starting = asyncio.ensure_future(subscription.start())
        frame = await peer.next(T.SUBSCRIBE)
        assert frame[-1] == wanted | ({"broadcast": True} if broadcast else {})
        peer.ok(frame, {"lease_ms": 30_000})
        await soon(starting)


async def test_what_is_said_of_order_keys_and_shares_is_set_part_by_part() -> None:
    for options, wire in (
        (LINES, LINES_WIRE),
        ({"order_retry": 1}, {"order_retry_ms": 1_000}),
        ({"fair_by": None, "limit_each": 2}, {"fair_by": None, "limit_each": 2}),
        (dict.fromkeys(LINES), dict.fromkeys(LINES_WIRE)),
    ):
        sent, found = await asked(
            T.CONFIGURE,
            SETTINGS | LINES_WIRE,
            lambda client, o=options: client.configure("t", "g", **o),
        )
        assert sent == ("t", "g", wire)
        assert {name: getattr(found, name) for name in LINES} == LINES
    _, found = await asked(T.CONFIGURE, SETTINGS, lambda client: client.configure("t", "g"))
    assert {name: getattr(found, name) for name in LINES} == dict.fromkeys(LINES)


async def test_a_consumer_names_what_its_group_says_of_them() -> None:
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        pulling = asyncio.ensure_future(client.pull("t", group="g", **LINES))
        frame = await peer.next(T.PULL)
        assert frame[-1] == LINES_WIRE
        peer.ok(frame, (1, NOW_MS, ()))
        assert await soon(pulling) == []
        starting = asyncio.ensure_future(client.subscribe("t", **LINES).start())
        frame = await peer.next(T.SUBSCRIBE)
        assert frame[-1] == LINES_WIRE
        peer.ok(frame, {"lease_ms": 30_000})
        await soon(starting)
        with pytest.raises(errors.BadRequest, match="fair_by has no meaning with broadcast"):
            client.subscribe("t", broadcast=True, fair_by="key")


async def test_what_is_said_of_them_is_of_the_right_type() -> None:
    wrong: Any
    async with FakeDaemon() as daemon, daemon.client() as client:
        for name, wrong, words in (
            ("order_attempts", 1.5, "an integer"), ("order_attempts", True, "an integer"),
            ("order_failure", 5, "a str"), ("fair_by", b"key", "a str"),
            ("limit_each", "5", "an integer"), ("rate_each", "5", "a number"),
            ("order_retry", -1, "order_retry"),
        ):  # fmt: skip
            with pytest.raises(errors.BadRequest, match=words):
                client.subscribe("t", **{name: wrong})
            for call in (client.create_group, client.configure):
                with pytest.raises(errors.BadRequest, match=words):
                    await call("t", "g", **{name: wrong})


async def test_held_keys_are_read_and_acted_on() -> None:
    one = {
        "id": 5, "key": "a", "since_ms": NOW_MS, "attempt": 16, "waiting": 3, "reason": "why",
        "subscriber": "w 1.2.3.4:5",
    }  # fmt: skip
    answer = {"keys": (one,), "held": 9, "paused": ()}
    sent, found = await asked(T.HELD_KEYS, answer, lambda client: client.held_keys("t", "g"))
    assert sent == ("t", "g", {"limit": 100})
    assert found == [HeldKey(**one, raw=one)]
    assert found[0].since == datetime.fromtimestamp(NOW_MS / 1000, UTC)
    line = {
        "id": 5, "kind": "fair", "value": 7, "state": "limited", "in_flight": 5, "waiting": 1,
    }  # fmt: skip
    answer = {"lines": (line,), "waiting": 1}
    sent, lines = await asked(
        T.KEY_LINES, answer, lambda client: client.key_lines("t", "g", limit=1)
    )
    assert sent == ("t", "g", {"limit": 1})
    assert lines == [KeyLine(**line, raw=line)]
    for kind, call, word in (
        (T.RELEASE_KEY, lambda client: client.release_key("t", "g", 5), "released"),
        (T.SKIP_KEY, lambda client: client.skip_key("t", "g", key="a"), "skipped"),
    ):
        sent, found_word = await asked(kind, ((5, word),), call)
        assert found_word == word
        assert sent == (("t", "g", (5,), None) if kind == T.RELEASE_KEY else ("t", "g", None, "a"))
    async with FakeDaemon() as daemon, daemon.client() as client:
        for arguments in ((), (5, "a")):
            key = arguments[1] if arguments else None
            with pytest.raises(errors.BadRequest, match="one of ids and key must be given"):
                await client.release_key("t", "g", *arguments[:1], key=key)


async def test_paused_keys_are_read() -> None:
    one = {"kind": "fair", "value": 7.5, "since_ms": NOW_MS, "by": "ann", "waiting": 3}
    answer = {"keys": (), "held": 0, "paused": (one,)}
    sent, found = await asked(T.HELD_KEYS, answer, lambda client: client.paused_keys("t", "g"))
    assert sent == ("t", "g", {"limit": 100})
    assert found == [PausedKey(**one, raw=one)]
    assert found[0].since == datetime.fromtimestamp(NOW_MS / 1000, UTC)


async def test_keys_are_paused_and_resumed() -> None:
    answer = {"paused": True, "changed": True, "since_ms": NOW_MS, "by": "ann"}
    sent, found = await asked(
        T.PAUSE_KEY, answer, lambda client: client.pause_key("t", "g", key="a")
    )
    assert sent == ("t", "g", "a", None)
    assert found == KeyPause(**answer, raw=answer)
    assert found.since == datetime.fromtimestamp(NOW_MS / 1000, UTC)
    answer = {"paused": False, "changed": False, "since_ms": None, "by": None}
    sent, found = await asked(
        T.RESUME_KEY, answer, lambda client: client.resume_key("t", "g", value=7.5)
    )
    assert sent == ("t", "g", None, 7.5)
    assert (found.changed, found.since, found.by) == (False, None, None)
    async with FakeDaemon() as daemon, daemon.client() as client:
        for both in ({}, {"key": "a", "value": "b"}):
            with pytest.raises(errors.BadRequest, match="one of key and value must be given"):
                await client.pause_key("t", "g", **both)


async def test_a_filter_is_a_text() -> None:
    wrong: Any = 5
    async with FakeDaemon() as daemon, daemon.client() as client:
        for name in ("tags", "where"):
            with pytest.raises(errors.BadRequest, match=f"{name} must be a str"):
                client.subscribe("t", **{name: wrong})
            for call in (client.create_group, client.configure):
                with pytest.raises(errors.BadRequest, match=f"{name} must be a str"):
                    await call("t", "g", **{name: wrong})


async def test_a_topic_is_deleted() -> None:
    held = {"pending": 5, "ready": 1, "in_flight": 0, "waiting": 2, "dead": 0, "groups": 1}
    sent, found = await asked(
        T.TOPIC_DELETE, held, lambda client: client.delete_topic("t", force=True)
    )
    assert (sent, found) == (("t", True), TopicHeld(**held))
    sent, _ = await asked(T.TOPIC_DELETE, held, lambda client: client.delete_topic("t"))
    assert sent == ("t", False)


def test_a_place_in_a_listing_has_parts_of_several_types() -> None:
    assert reader_of(tuple[int, str])((3, "g")) == (3, "g")
    assert reader_of(tuple[int, ...])((3, 4, 5)) == (3, 4, 5)
    with pytest.raises(ValueError, match="argument 2"):
        reader_of(tuple[int, str])((3,))
