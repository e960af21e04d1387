"""Dead letters by selection: page by page, at a rate, counted; against a scripted daemon."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon
from support.waiting import soon
from tickwheel.api.frames import FrameType as T
from tickwheel.cli import tasks
from tickwheel.cli.call import Call
from tickwheel.cli.output import Output
from tickwheel.cli.tasks import chunk_size, pause_s, purge, requeue
from tickwheel.errors import BadRequest, Refused


def _letter(task_id: int) -> dict[str, Any]:
    return {
        "id": task_id, "group": "g", "topic": "t", "died_ms": NOW_MS, "attempt": 3,
        "reason": "no", "failures": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "size"), [(None, 1_000), (0.5, 1), (1, 1), (50, 10), (1e6, 1_000)]
)
def test_chunk_size_follows_the_rate(rate: float | None, size: int) -> None:
    assert chunk_size(rate) == size


@pytest.mark.parametrize(
    ("done", "elapsed_s", "rate", "wait_s"),
    [(100, 0.0, None, 0.0), (10, 0.0, 10, 1.0), (10, 0.4, 10, 0.6), (10, 5.0, 10, 0.0)],
)
def test_chunk_pause_keeps_the_requested_rate(
    done: int, elapsed_s: float, rate: float | None, wait_s: float
) -> None:
    assert pause_s(done, elapsed_s, rate) == pytest.approx(wait_s)


async def test_requeue_skips_dead_letters_made_after_it_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "CHUNK_MAX", 2)
    async with FakeDaemon() as daemon:
        call = Call(daemon.url, None, Output(as_json=True))
        running = asyncio.ensure_future(requeue(call, topic="t", reason="timeout"))
        peer = await daemon.peer()
        asked = await peer.next(T.DEAD_LIST)
        assert asked[2]["topic"] == "t"
        assert asked[2]["reason"] == "timeout"
        assert asked[2]["until_ms"] == NOW_MS + 1
        peer.ok(asked, {"dead": [_letter(n) for n in (1, 2, 3)], "next": (3, "g")})
        settled = await peer.next(T.DEAD_REQUEUE)
        assert settled[2] == ((1, "g"), (2, "g"))
        assert peer.nothing()
        peer.ok(settled, ("requeued", "unknown"))
        asked = await peer.next(T.DEAD_LIST)
        assert asked[2]["after"] == (3, "g")
        peer.ok(asked, {"dead": [_letter(4)], "next": None})
        settled = await peer.next(T.DEAD_REQUEUE)
        assert settled[2] == ((3, "g"), (4, "g"))
        peer.ok(settled, ("requeued", "requeued"))
        assert await soon(running) == 0
    (line,) = capsys.readouterr().out.splitlines()
    summary = json.loads(line)
    assert summary["took_s"] >= 0
    assert {k: v for k, v in summary.items() if k != "took_s"} == {
        "matched": 4, "requeued": 3, "unknown": 1,
    }  # fmt: skip


async def test_a_failed_requeue_reports_earlier_pages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "CHUNK_MAX", 1)
    monkeypatch.setattr(Call, "client", lambda self: daemon.client(retries=0))
    async with FakeDaemon() as daemon:
        call = Call(daemon.url, None, Output(as_json=True))
        running = asyncio.ensure_future(requeue(call, all_=True))
        peer = await daemon.peer()
        peer.ok(await peer.next(T.DEAD_LIST), {"dead": [_letter(1), _letter(2)], "next": None})
        peer.ok(await peer.next(T.DEAD_REQUEUE), ("requeued",))
        peer.error(await peer.next(T.DEAD_REQUEUE), "refused")
        with pytest.raises(Refused):
            await soon(running)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "tickwheel: 1 requeued before this error; repeat the command for the others\n"
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "give ids, or --topic"),
        ({"ids": ["1"], "all_": True}, "ids or --all"),
        ({"ids": ["1"], "topic": "t"}, "--topic cannot be combined"),
        ({"ids": ["1"], "reason": "x"}, "--reason cannot be combined"),
    ],
)
async def test_requeue_with_invalid_options_settles_nothing(
    given: dict[str, Any], named: str
) -> None:
    call = Call("tcp://127.0.0.1:1", None, Output(as_json=True))
    with pytest.raises(BadRequest, match=named):
        await requeue(call, **given)


async def test_purge_without_a_terminal_refuses_and_says_how_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = dict.fromkeys(
        ("scheduled", "ready", "in_flight", "waiting", "enqueued", "delivered", "acked"), 0
    )
    group = {**counts, "dead": 3, "subscribers": 0}
    topics = {
        "a": {**counts, "dead": 5, "groups": {"g": group, "h": {**group, "dead": 2}}},
        "b": {**counts, "dead": 1, "groups": {"g": {**group, "dead": 1}}},
    }
    for given, said in (
        ({}, "6 dead letters would"),
        ({"topic": "a"}, "5 dead letters of topic a would"),
        ({"group": "g"}, "4 dead letters of group g would"),
        ({"topic": "a", "group": "h"}, "2 dead letters of topic a of group h would"),
    ):
        async with FakeDaemon() as daemon:
            call = Call(daemon.url, None, Output(as_json=True))
            running = asyncio.ensure_future(purge(call, **given))  # type: ignore[arg-type]  # each is text
            peer = await daemon.peer()
            peer.ok(await peer.next(T.STATS), {**counts, "dead": 6, "topics": topics})
            assert await soon(running) == 1
        assert said in capsys.readouterr().err


async def test_requeue_counts_dead_letters_with_an_expired_ttl(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with FakeDaemon() as daemon:
        call = Call(daemon.url, None, Output(as_json=False))
        running = asyncio.ensure_future(requeue(call, topic="t"))
        peer = await daemon.peer()
        asked = await peer.next(T.DEAD_LIST)
        peer.ok(asked, {"dead": [_letter(n) for n in (1, 2, 3)], "next": None})
        settled = await peer.next(T.DEAD_REQUEUE)
        peer.ok(settled, ("requeued", "ttl_over", "ttl_over"))
        assert await soon(running) == 1
    out, err = capsys.readouterr()
    assert out.startswith("1 requeued, 2 ttl over in ")
    assert "ttl_over: 2 dead letters were not requeued, because their ttl is over" in err
