"""The daemon's end of the process that sends, with processes that do not behave."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.waiting import comes
from tickwheel.errors import Overloaded, Refused
from tickwheel.model.kinds import TargetRow
from tickwheel.server import companion
from tickwheel.server import outbound as module
from tickwheel.server.outbound import Outbound

ROW = TargetRow("t", "g", "push", "https://example.com/", ("whsec_AAAA",), (), 1, "me")


def serving(events: list[str]) -> Outbound:
    """One that has a target, and so a process."""
    roles: Any = SimpleNamespace(http_url=None, on_event=lambda name, text: events.append(name))
    shard: Any = SimpleNamespace(core=SimpleNamespace(targets={("t", "g"): ROW}))
    made = Outbound(
        cast("Any", SimpleNamespace(push_networks=())),
        cast("Any", SimpleNamespace(companions={})),
        roles,
        url=lambda: "tcp://127.0.0.1:1",
        get_callback_url=lambda: None,
        connection=cast("Any", None),
    )
    made.serve(shard, cast("Any", object()))
    return made


async def test_requests_to_the_outbound_process_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process does not answer, as if its endpoint hung."""
    monkeypatch.setattr(companion, "PYTHON", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    monkeypatch.setattr(module, "ASKED_MAX", 2)
    made = serving([])
    try:
        asking = [asyncio.create_task(made.ask("log")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"2 questions .* limit is 2 \(ASKED_MAX\)"):
            await made.ask("log")
        asking[0].cancel()
        await asyncio.wait(asking[:1])
        asking.append(asyncio.create_task(made.ask("log")))
        await asyncio.sleep(0)
        assert not asking[2].done()
    finally:
        await made.stop()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, Refused, Refused]


@pytest.mark.parametrize("said", ["", '{"state": ["t", "g"', "hello\n", "5\n", "x" * 100])
async def test_an_outbound_process_ending_mid_line_is_restarted(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """As one does that is killed while it writes."""
    monkeypatch.setattr(companion, "PYTHON", (sys.executable, "-c", f"print({said!r}, end='')"))
    monkeypatch.setattr(companion, "RESTART_S", 0.001)
    events: list[str] = []
    made = serving(events)
    try:
        await comes(lambda: made.restarts >= 2)
    finally:
        await made.stop()
    assert set(events) == {"outbound_ended"}


@pytest.mark.parametrize("stands_by", [False, True])
@pytest.mark.parametrize("said", ["print('hello', flush=True)", "while True: print('x' * 99_999)"])
async def test_a_stop_ends_all_outbound_processes(
    monkeypatch: pytest.MonkeyPatch, said: str, stands_by: bool
) -> None:
    """Includes a process killed for an invalid line while it still has output."""
    begun: list[Process] = []
    begin = companion.start_process

    async def noting(*given: Any, **options: Any) -> Process:
        begun.append(await begin(*given, **options))
        return begun[-1]

    monkeypatch.setattr(companion, "start_process", noting)
    command = sys.executable, "-c", f"import sys\n{said}\nsys.stdin.read()"
    monkeypatch.setattr(companion, "PYTHON", command)
    events: list[str] = []
    made = serving(events)
    try:
        await comes(lambda: begun if stands_by else events, every_s=0)
        if stands_by:
            made.stand_by()
    finally:
        await made.stop()
    assert [process.returncode is not None for process in begun] == [True]
