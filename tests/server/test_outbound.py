"""The daemon's end of the process that sends, with processes that do not behave."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.waiting import comes
from tickwheel.model.kinds import TargetRow
from tickwheel.server import outbound as module
from tickwheel.server.outbound import Outbound

ROW = TargetRow("t", "g", "push", "https://example.com/", ("whsec_AAAA",), (), 1, "me")


@pytest.mark.parametrize("said", ["", '{"state": ["t", "g"', "hello\n", "x" * 100])
async def test_one_that_ends_in_the_middle_of_a_line_is_started_again(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """As one does that is killed while it writes."""
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", f"print({said!r}, end='')"))
    monkeypatch.setattr(module, "RESTART_S", 0.001)
    events: list[str] = []
    roles: Any = SimpleNamespace(http_url=None, on_event=lambda name, text: events.append(name))
    shard: Any = SimpleNamespace(core=SimpleNamespace(targets={("t", "g"): ROW}))
    made = Outbound(
        cast("Any", SimpleNamespace(push_networks=())),
        cast("Any", SimpleNamespace(own=b"")),
        roles,
        url=lambda: "tcp://127.0.0.1:1",
        connection=cast("Any", None),
    )
    made.serve(shard, cast("Any", object()))
    try:
        await comes(lambda: made.restarts >= 2)
    finally:
        await made.stop()
    assert set(events) == {"outbound_ended"}
