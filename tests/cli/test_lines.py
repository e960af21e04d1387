"""What the commands on held keys and lines ask the daemon, and how they show its answers."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cli.test_groups import _ask
from support.sender import SENT
from tickwheel.api.frames import FrameType as T
from tickwheel.api.targets import LOG_MAX
from tickwheel.cli.call import Call
from tickwheel.cli.groups import OF_GROUPS, OF_PUSH
from tickwheel.cli.options import parse_value
from tickwheel.cli.output import Output
from tickwheel.errors import BadRequest

held, lines, paused, release_key, skip_key, pause_key, resume_key = (
    OF_GROUPS[name]
    for name in ("held", "lines", "paused", "release_key", "skip_key", "pause_key", "resume_key")
)

HELD: dict[str, Any] = {
    "id": 5, "key": "customer 7", "attempt": 16, "waiting": 1_200, "reason": "no card",
    "subscriber": "w",
}  # fmt: skip
LINE = {
    "id": 6, "kind": "order", "value": "a", "state": "in_flight", "in_flight": 1, "waiting": 2,
}  # fmt: skip
FAIR = {"id": 7, "kind": "fair", "value": None, "state": "limited", "in_flight": 5, "waiting": 1}


async def test_held_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    one = HELD | {"since_ms": int(time.time() * 1000) - 60_000}
    answer = {"keys": (one,), "held": 1, "paused": ()}
    assert await _ask(lambda c: held(c, topic="t", group="g"), T.HELD_KEYS, answer) == (
        "t", "g", {"limit": 101},
    )  # fmt: skip
    shown = capsys.readouterr().out
    for word in ("customer 7", "1,200", "no card", "16", " 1m"):
        assert word in shown, (word, shown)
    await _ask(lambda c: held(c, topic="t", group="g"), T.HELD_KEYS, answer, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert (result["id"], result["key"], result["waiting"]) == ("5", "customer 7", 1_200)
    assert result["since"].endswith("Z") or "+" in result["since"]
    await _ask(lambda c: held(c, topic="t", group="g"), T.HELD_KEYS, answer | {"keys": ()})
    assert "no key of group g of topic t is held" in capsys.readouterr().err


async def test_order_lines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"lines": (LINE, FAIR), "waiting": 3}
    asked = await _ask(lambda c: lines(c, topic="t", group="g", limit=5), T.KEY_LINES, answer)
    assert asked == ("t", "g", {"limit": 6})
    order, fair = capsys.readouterr().out.splitlines()[-2:]
    assert "in flight" in order and "a" in order and "limited" in fair and "-" in fair
    await _ask(lambda c: lines(c, topic="t", group="g"), T.KEY_LINES, answer, as_json=True)
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["value"], row["id"]) for row in results] == [("a", "6"), (None, "7")]
    await _ask(lambda c: lines(c, topic="t", group="g"), T.KEY_LINES, {"lines": (), "waiting": 0})
    assert "waits for its turn" in capsys.readouterr().err


async def test_a_key_is_paused_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"paused": True, "changed": True, "since_ms": 1_800_000_000_000, "by": "ann"}
    asked = await _ask(lambda c: pause_key(c, topic="t", group="g", key="a"), T.PAUSE_KEY, answer)
    assert asked == ("t", "g", "a", None)
    assert capsys.readouterr().out == "key a  paused\n"
    before = answer | {"changed": False}
    value = parse_value(":=7")
    asked = await _ask(
        lambda c: pause_key(c, topic="t", group="g", value=value), T.PAUSE_KEY, before
    )
    assert asked == ("t", "g", None, 7)
    shown = capsys.readouterr().out
    assert shown.startswith("value 7  already paused since 2027-") and shown.endswith(" by ann\n")
    await _ask(
        lambda c: pause_key(c, topic="t", group="g", value="7"),
        T.PAUSE_KEY,
        before,
        as_json=True,
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["value"], result["key"], result["by"], result["changed"]) == (
        "7",
        None,
        "ann",
        False,
    )
    assert result["since"].startswith("2027-")
    over = answer | {"paused": False}
    await _ask(lambda c: resume_key(c, topic="t", group="g", key="a"), T.RESUME_KEY, over)
    nothing = {"paused": False, "changed": False, "since_ms": None, "by": None}
    await _ask(lambda c: resume_key(c, topic="t", group="g", key="b"), T.RESUME_KEY, nothing)
    assert capsys.readouterr().out == "key a  resumed\nkey b  was not paused\n"
    call = Call(None, None, Output(as_json=False))
    for named in ({}, {"value": 5, "key": "a"}):
        with pytest.raises(BadRequest, match="--key, --value"):
            await pause_key(call, topic="t", group="g", **named)


async def test_paused_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    since_ms = int(time.time() * 1000) - 60_000
    one = {"kind": "fair", "value": 7, "since_ms": since_ms, "by": "ann", "waiting": 1_200}
    answer = {"keys": (), "held": 0, "paused": (one,)}
    asked = await _ask(lambda c: paused(c, topic="t", group="g", limit=5), T.HELD_KEYS, answer)
    assert asked == ("t", "g", {"limit": 6})
    shown = capsys.readouterr().out.splitlines()[-1].split()
    assert shown[0] == "fair" and shown[1] == "7" and shown[-2:] == ["ann", "1,200"], shown
    await _ask(lambda c: paused(c, topic="t", group="g"), T.HELD_KEYS, answer, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert (result["value"], result["by"], result["group"]) == (7, "ann", "g") and "since" in result
    await _ask(lambda c: paused(c, topic="t", group="g"), T.HELD_KEYS, answer | {"paused": ()})
    assert "no key of group g of topic t is paused" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [True, False])
async def test_a_log_of_requests_is_shown_like_other_lists(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json whole, as long as the daemon keeps it."""
    requests = tuple(SENT | {"number": number} for number in range(120, 0, -1))
    (topic, group, options) = await _ask(
        lambda c: OF_PUSH["log"](c, topic="t", group="g"),
        T.PUSH_LOG, {"requests": requests}, as_json=as_json,
    )  # fmt: skip
    assert (topic, group, options) == ("t", "g", {"limit": LOG_MAX if as_json else 101})
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert len(lines) == (120 if as_json else 101), "a table has a head"
    assert ("100 rows" in shown.err) is not as_json
    if as_json:
        assert json.loads(lines[-1])["number"] == 1


@pytest.mark.parametrize(
    ("text", "value"), [("a=b", "a=b"), ("", ""), (":=1.5", 1.5), (":=true", True), ("12", "12")]
)
def test_line_values_are_written_like_properties(text: str, value: object) -> None:
    assert parse_value(text) == value


async def test_a_held_key_is_released_or_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    asked = await _ask(
        lambda c: release_key(c, topic="t", group="g", task_id=5), T.RELEASE_KEY, ((5, "released"),)
    )
    assert asked == ("t", "g", (5,), None)
    assert capsys.readouterr().out == "5  released\n"
    asked = await _ask(
        lambda c: skip_key(c, topic="t", group="g", key="a"), T.SKIP_KEY, ((None, "not_held"),)
    )
    assert asked == ("t", "g", None, "a")
    assert capsys.readouterr().out == "key a  not held\n"
    call = Call(None, None, Output(as_json=False))
    for named in ({}, {"task_id": 5, "key": "a"}):
        with pytest.raises(BadRequest, match="TASK_ID, --key"):
            await skip_key(call, topic="t", group="g", **named)
