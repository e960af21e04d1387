"""What the commands on groups ask the daemon, and how they show its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from support.fake_daemon import FakeDaemon
from support.waiting import soon
from tickwheel.api.frames import FrameType as T
from tickwheel.api.groups import GroupFields
from tickwheel.cli import groups
from tickwheel.cli.call import Call
from tickwheel.cli.options import GroupOptions, group_keywords
from tickwheel.cli.output import Output
from tickwheel.cli.subscribe import subscribe
from tickwheel.client import Retry
from tickwheel.errors import BadRequest, Conflict, NotFound, TickwheelError

POLICY = {"kind": "fixed", "delay_ms": 5_000, "retries": 2, "jitter": 0.0}
SETTINGS = {
    "topic": "orders", "group": None, "paused": False, "rate": None, "burst": None, "retry": None,
}  # fmt: skip
GROUP = {
    **dict.fromkeys(("ready", "in_flight", "waiting", "dead", "delivered", "acked"), 0),
    "subscribers": 2, "paused": True, "rate": 5.0, "burst": 9, "retry": POLICY, "since_ms": 0,
    "oldest_ready_ms": 90_000,
}  # fmt: skip
TOPIC = {
    **GROUP, "scheduled": 1_234, "enqueued": 3, "paused": False, "rate": None, "burst": None,
    "retry": {**POLICY, "name": "own"},
    "groups": {
        "billing": GROUP,
        "mail": {
            **GROUP, "retry": None, "unused_ms": 691_200_000,
            "replay": {"looked_at": 8, "given": 7, "share": 0.256},
        },
    },
}  # fmt: skip
STATS = {
    **dict.fromkeys(
        ("scheduled", "ready", "in_flight", "waiting", "dead", "enqueued", "delivered", "acked"), 0
    ),
    "topics": {"orders": TOPIC},
}  # fmt: skip

Run = Callable[[Call], Coroutine[Any, Any, int | None]]
Answer = dict[str, Any] | TickwheelError


async def _ask(run: Run, kind: T, answer: Answer, *, as_json: bool = False) -> tuple[Any, ...]:
    """Run a command against a daemon that answers so; the frame that it sent."""
    async with FakeDaemon() as daemon:
        running = asyncio.ensure_future(run(Call(daemon.url, None, Output(as_json=as_json))))
        peer = await daemon.peer()
        frame = await peer.next()
        if frame[0] == T.STATS != kind:  # whether the topic is known
            peer.ok(frame, STATS)
            frame = await peer.next()
        assert frame[0] == kind
        if isinstance(answer, TickwheelError):
            peer.error(frame, answer.code, answer.message)
        else:
            peer.ok(frame, answer)
        await soon(running)
        return tuple(frame[2:])


# --- what is asked ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"tags": "eu"}, {"tags": "eu"}),
        ({"where": "a > 1"}, {"where": "a > 1"}),
        ({"tags": "eu", "where": "a > 1"}, {"tags": "eu", "where": "a > 1"}),
        ({"tags": "eu", "no_where": True}, {"tags": "eu", "where": None}),
        ({"no_tags": True}, {"tags": None}),
        ({"all_": True}, {"tags": None, "where": None}),
    ],
)
async def test_group_filter_is_set(
    options: dict[str, Any], changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {**SETTINGS, "group": "g", "tags": "eu", "where": "a > 1"}
    asked = await _ask(
        lambda call: groups.set_group(call, "orders", "g", **options), T.CONFIGURE, answer
    )
    assert asked == ("orders", "g", changed)
    assert capsys.readouterr().out.endswith("no rate limit  tags eu, where a > 1\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give at least one setting"),
        ({"tags": "eu", "all_": True}, "--tags, --where or both"),
        ({"where": "a > 1", "no_where": True}, "--no-where removes a setting"),
        ({"no_tags": True, "all_": True}, "--tags, --where or both"),
        ({"order_attempts": 5, "no_order": True}, "--no-order removes a setting"),
        ({"rate_each": 5.0, "no_fair": True}, "--no-fair removes a setting"),
    ],
)
async def test_groups_set_needs_an_option(options: dict[str, Any], words: str) -> None:
    call = Call(None, None, Output(as_json=False))
    with pytest.raises(BadRequest, match=words):
        await groups.set_group(call, "orders", "g", **options)


LINES = {
    "order_retry_ms": 50, "order_attempts": 3, "order_failure": "hold", "fair_by": "tenant",
    "limit_each": 5, "rate_each": 2.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"order_retry": 0.05, "fair_by": "key"}, {"order_retry_ms": 50, "fair_by": "key"}),
        ({"order_failure": "hold", "order_attempts": 3}, {"order_failure": "hold"}
         | {"order_attempts": 3}),
        ({"limit_each": 0, "rate_each": 5.0}, {"limit_each": None, "rate_each": 5.0}),
        ({"no_order": True, "tags": "eu"},
         {"tags": "eu"} | dict.fromkeys(("order_retry_ms", "order_attempts", "order_failure"))),
        ({"no_fair": True}, dict.fromkeys(("fair_by", "limit_each", "rate_each"))),
        ({"fair_by": "", "order_retry": 0.0}, {"fair_by": "", "order_retry_ms": 0}),
    ],
)  # fmt: skip
async def test_group_ordering_and_fairness_are_set(
    options: dict[str, Any], changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {**SETTINGS, "group": "g", **LINES}
    asked = await _ask(
        lambda call: groups.set_group(call, "orders", "g", **options), T.CONFIGURE, answer
    )
    assert asked == ("orders", "g", changed)
    assert capsys.readouterr().out.endswith(
        "no rate limit  order retry 50ms  hold after 3 attempts"
        "  fair by tenant (5 in flight, 2.5/s each)\n"
    )


def test_only_a_limit_of_0_removes_a_setting() -> None:
    """The daemon refuses all the others, such as the text of an unset variable of a shell."""
    empty: dict[str, Any] = {
        "tags": "", "where": "", "order_retry": 0.0, "order_attempts": 0, "order_failure": "",
        "fair_by": "", "limit_each": 0, "rate_each": 0.0,
    }  # fmt: skip
    assert empty.keys() == {field.python for field in GroupFields.fields()}
    keywords = {**group_keywords(cast("GroupOptions", empty))}
    assert keywords == empty | {"limit_each": None, "rate_each": None}


async def test_an_empty_group_is_not_the_default_group() -> None:
    async with FakeDaemon() as daemon:
        call = Call(daemon.url, None, Output(as_json=True))
        with pytest.raises(BadRequest, match="group must be 1 to 255 characters"):
            await soon(subscribe(call, "orders", group=""))


async def test_ordering_column_appears_when_a_group_sets_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    topic = TOPIC | {"groups": {"billing": GROUP | LINES, "mail": GROUP}}
    await _ask(groups.list_groups, T.STATS, STATS | {"topics": {"orders": topic}})
    assert "order, shares" in capsys.readouterr().out
    await _ask(groups.list_groups, T.STATS, STATS)
    assert "order, shares" not in capsys.readouterr().out


async def test_group_is_created(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {**SETTINGS, "group": "g", "rate": 5.0, "burst": 9, "retry": POLICY, "created": False}
    given = {"start": "first", "retry": Retry.of(POLICY), "rate": 5.0, "burst": 9, "paused": True}
    asked = await _ask(
        lambda call: groups.create_group(call, topic="orders", group="g", **given),
        T.GROUP_CREATE, answer,
    )  # fmt: skip
    options = {"since": "first", "retry": POLICY, "rate": 5.0, "burst": 9, "paused": True}
    assert asked == ("orders", "g", options)
    output = capsys.readouterr()
    assert output.out == (
        "orders  g  active  rate 5/s burst 9  retry fixed:delay=5s,retries=2,jitter=0\n"
    )
    assert "already exists" in output.err


async def test_deleting_a_group_prints_its_counts(capsys: pytest.CaptureFixture[str]) -> None:
    held = {"ready": 1_500, "in_flight": 0, "waiting": 2, "dead": 0}
    asked = await _ask(
        lambda call: groups.delete_group(call, topic="orders", group="g", force=True),
        T.GROUP_DELETE,
        held,
    )
    assert asked == ("orders", "g", True, {"dry_run": False})
    assert capsys.readouterr().out == "orders  g  deleted with 1,500 ready, 2 waiting\n"


async def test_deleting_a_nonempty_group_without_a_terminal_needs_force() -> None:
    with pytest.raises(Conflict, match="it holds 3 ready; --force deletes it with them"):
        await _ask(
            lambda call: groups.delete_group(call, topic="orders", group="g"),
            T.GROUP_DELETE,
            Conflict("it holds 3 ready"),
        )


async def test_deleting_a_topic_prints_its_counts(capsys: pytest.CaptureFixture[str]) -> None:
    held = {"scheduled": 1_500, "ready": 0, "in_flight": 1, "waiting": 0, "dead": 2, "groups": 3}
    asked = await _ask(
        lambda call: groups.delete_topic(call, topic="orders", force=True), T.TOPIC_DELETE, held
    )
    assert asked == ("orders", True, {"dry_run": False})
    answer = capsys.readouterr().out
    assert answer == "orders  deleted with 1,500 scheduled, 1 in flight, 2 dead, 3 groups\n"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("it holds 3 ready", "it holds 3 ready; --force deletes it with them"),
        ("schedules enqueue to it: s; delete them first", "s; delete them first$"),
    ],
)
async def test_deleting_a_topic_without_a_terminal_needs_force(message: str, shown: str) -> None:
    with pytest.raises(Conflict, match=shown):
        await _ask(
            lambda call: groups.delete_topic(call, topic="orders"),
            T.TOPIC_DELETE,
            Conflict(message),
        )


# --- what is shown ---------------------------------------------------------------------------


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


async def test_topics_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    await _ask(groups.topics, T.STATS, STATS)
    head, row = _lines(capsys)
    assert "oldest" in head
    assert row.split() == [
        "orders", "1,234", "0", "0", "0", "0", "1m", "30s", "-", "-", "2", "1", "3", "0",
        "0",
    ]  # fmt: skip


async def test_topics_of_an_older_daemon_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    old = {name: TOPIC[name] for name in (*STATS, "groups") if name in TOPIC}
    await _ask(groups.topics, T.STATS, {**STATS, "topics": {"orders": {**old, "groups": {}}}})
    assert _lines(capsys)[1].split()[6:9] == ["-", "-", "-"]


async def test_groups_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    await _ask(groups.list_groups, T.STATS, STATS)
    lines = _lines(capsys)
    assert [line.split()[1] for line in lines[1:]] == ["billing", "mail"]
    assert "paused  5/s burst 9  fixed x2" in lines[1]
    assert [line.split()[-2] for line in lines] == ["replay", "-", "26%"]
    assert "unused" in lines[0] and "8d" in lines[2] and "8d" not in lines[1]
    await _ask(lambda call: groups.list_groups(call, "orders"), T.STATS, STATS, as_json=True)
    results = [json.loads(line) for line in _lines(capsys)]
    assert [(g["topic"], g["group"], g["subscribers"]) for g in results] == [
        ("orders", "billing", 2), ("orders", "mail", 2),
    ]  # fmt: skip
    with pytest.raises(NotFound, match="no topic 'nosuch'"):
        await _ask(lambda call: groups.list_groups(call, "nosuch"), T.STATS, STATS)


async def test_show_policy_names_the_policy_and_its_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await _ask(lambda call: groups.show_policy(call, "orders"), T.STATS, STATS, as_json=True)
    results = [json.loads(line) for line in _lines(capsys)]
    assert [(p["group"], p["from"], p["holds"].get("name")) for p in results] == [
        (None, "topic", "own"), ("billing", "group", None), ("mail", "topic", "own"),
    ]  # fmt: skip
    await _ask(lambda call: groups.show_policy(call, "orders", "mail"), T.STATS, STATS)
    (_, row) = _lines(capsys)
    assert row.split()[:4] == ["orders", "mail", "-", "own"]
    bare = {**STATS, "topics": {"orders": {**TOPIC, "retry": None, "groups": {}}}}
    await _ask(lambda call: groups.show_policy(call, "orders"), T.STATS, bare)
    assert "the daemon's default" in _lines(capsys)[1]
    for given in (("nosuch", None), ("orders", "nosuch")):
        with pytest.raises(NotFound, match="nosuch"):
            await _ask(lambda call, given=given: groups.show_policy(call, *given), T.STATS, STATS)  # type: ignore[misc]  # bound early
