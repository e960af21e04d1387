"""The metrics of several shards put together, and work that is done once for all who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import h11
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

from support.waiting import soon
from tickwheel.inside import _Log
from tickwheel.server.fleet.board import Board, ProcessState, State
from tickwheel.server.http import all_shards
from tickwheel.server.http.all_shards import (
    AllShardsServer,
    NoAnswer,
    SharedCalls,
    add_shard_metrics,
    fetch,
)
from tickwheel.server.metrics import catalogue
from tickwheel.server.settings import Settings

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
PLAIN = rb"""# HELP up Whether it is; "quoted", \\ and a \n break.
# TYPE up gauge
up 1
# HELP tasks_total Tasks.
# TYPE tasks_total counter
tasks_total{topic="a",group="b 1"} 7
tasks_total{topic="x{y} 2",group="\"z\\\n"} 8.5
# HELP late_seconds How late.
# TYPE late_seconds histogram
late_seconds_bucket{le="0.1"} 1
late_seconds_bucket{le="+Inf"} 2
late_seconds_count 2
late_seconds_sum 3e-05
"""
OPEN = rb"""# HELP cpu_seconds Processor time.
# TYPE cpu_seconds counter
# UNIT cpu_seconds seconds
cpu_seconds_total 1.5
# HELP info Words.
# TYPE info gauge
info{server=""} 1
# EOF
"""


def of(found: Iterable[Metric], **more: str) -> Samples:
    return {
        (sample.name, frozenset((sample.labels | more).items())): sample.value
        for metric in found
        for sample in metric.samples
    }


def merged(*texts: bytes) -> bytes:
    result: dict[bytes, list[bytes]] = {}
    for shard, text in enumerate(texts):
        add_shard_metrics(result, shard, text)
    return b"".join(part for family in result.values() for part in family)


def test_merged_metrics_label_each_sample_with_its_shard() -> None:
    other = PLAIN.replace(b"7\n", b"9\n").replace(b"# HELP up", b"# HELP new N.\nnew 3\n# HELP up")
    text = merged(PLAIN, other).decode()
    wanted = of(families(PLAIN.decode()), shard="0") | of(families(other.decode()), shard="1")
    assert of(families(text)) == wanted
    assert len(wanted) == 2 * 7 + 1
    for name in ("up", "tasks_total", "late_seconds"):
        assert text.count(f"# HELP {name} ") == text.count(f"# TYPE {name} ") == 1
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert names == ["up", "tasks_total", "late_seconds", "new"]


def test_merged_openmetrics_have_one_end() -> None:
    text = merged(OPEN, OPEN).decode()
    assert "# EOF" not in text
    result = of(open_families(text + "# EOF\n"))
    assert result == {
        (name, frozenset({"shard": str(shard), **labels}.items())): value
        for shard in range(2)
        for name, labels, value in (("cpu_seconds_total", {}, 1.5), ("info", {"server": ""}, 1))
    }


def test_no_daemon_metric_uses_the_shard_label() -> None:
    assert not [name for name, labels in catalogue.names().items() if "shard" in labels]


async def test_concurrent_requests_share_one_result() -> None:
    begun: list[str] = []
    over = asyncio.Event()

    async def work(what: str) -> str:
        begun.append(what)
        await over.wait()
        return f"{what} {len(begun)}"

    ask = SharedCalls(work)
    askers = [asyncio.create_task(ask(what)) for what in ("a", "a", "b", "a")]
    await asyncio.sleep(0)
    askers[0].cancel()  # who goes away takes nothing from the others
    await asyncio.sleep(0)
    over.set()
    assert await asyncio.gather(*askers[1:]) == ["a 2", "b 2", "a 2"]
    assert begun == ["a", "b"]
    assert await ask("a") == "a 3"


async def test_a_failed_shared_request_fails_all_and_is_retried() -> None:
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        raise OSError(str(tries))

    ask = SharedCalls(work)
    answer = await asyncio.gather(ask(), ask(), return_exceptions=True)
    assert [str(error) for error in answer] == ["1", "1"]
    with pytest.raises(OSError, match="2"):
        await ask()


# --- what a shard may answer ----------------------------------------------------------------------


async def asked(answer: bytes, *, bytes_max: int = 100) -> tuple[int, bytes]:
    """What ``get`` makes of what a server says, which ends then."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    heard: list[bytes] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        result = await soon(fetch("127.0.0.1", port, "/x", "text/plain", bytes_max, None))
    assert heard[0].startswith(b"GET /x HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n" % port)
    return result


async def test_an_answer_at_the_size_limit_is_accepted() -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 100\r\n\r\n"
    assert await asked(head + b"x" * 100) == (503, b"x" * 100)
    with pytest.raises(NoAnswer, match="the answer to /x has more than 99 bytes"):
        await asked(head + b"x" * 100, bytes_max=99)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
        b"\x15\x03" * 99,
    ],
)
async def test_an_incomplete_answer_is_an_error(answer: bytes) -> None:
    with pytest.raises(h11.RemoteProtocolError):
        await asked(answer)


def test_a_board_shows_the_last_entry_of_each_shard() -> None:
    board = Board(3)
    assert board.read(2) == ProcessState(0, State.DOWN, 0, 0, 0)
    for pid in (5, 2**22):
        board.write(1, ProcessState(pid, State.SERVES, 1_700_000_000_000, 3, -9))
    assert board.read(1) == ProcessState(2**22, State.SERVES, 1_700_000_000_000, 3, -9)
    assert board.read(0) == board.read(2) == ProcessState(0, State.DOWN, 0, 0, 0)


async def test_internal_errors_of_all_shards_are_counted() -> None:
    server = AllShardsServer(Settings(store="memory:"), [], Board(1), cast("Any", _Log()))
    server._on_event("internal_error", "on purpose")
    values = {family.name: family.values for family in server._own_metrics()}
    assert values["tickwheel_internal_errors_total"] == [1]


def test_the_api_of_all_shards_announces_the_limits_of_the_daemons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own connections to the shards have another limit."""
    served: list[Settings] = []

    async def serve(*_: Any) -> int:
        return 0

    monkeypatch.setattr(all_shards, "configure", lambda *_: _Log())
    monkeypatch.setattr("tickwheel.server.daemon.use_one_arena", lambda: None)
    monkeypatch.setattr(all_shards, "AllShardsServer", lambda own, *_: served.append(own))
    monkeypatch.setattr(all_shards, "_serve", serve)
    settings = Settings(store="memory:", http="127.0.0.1:0", connections_max=50)
    assert all_shards.run(settings, [settings] * 2, Board(2), lambda: None) == 0
    assert served[0].limits() == settings.limits()
