"""Tasks by their ids: what a lookup says, and the exit code for many of them."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.fake_daemon import FakeDaemon
from tickwheel.api.frames import FrameType as T
from tickwheel.cli.app import run
from tickwheel.cli.call import EXIT_USAGE
from tickwheel.cli.tasks import verdict

EXPLAINED = {
    "id": 7, "topic": "t", "cause": "key_busy", "detail": "It waits\x1b.", "group": "g",
    "command": "tickwheel explain 5", "behind": 5, "next_ms": None, "others_left_out": 0,
}  # fmt: skip
OTHER = {"cause": "leased", "detail": "It is with w.", "group": "h", "command": None}


@pytest.mark.parametrize("words", [[], ["--key", "a"], ["--topic", "t"], ["7", "--key", "a"]])
def test_explain_without_a_task_names_the_options_it_needs(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(["explain", *words]) == EXIT_USAGE
    assert "give either ID, or --topic and --key" in capsys.readouterr().err


@pytest.mark.parametrize(("cause", "code"), [("key_busy", 0), ("gone", 4), ("not_found", 4)])
async def test_a_task_is_explained_in_a_sentence_with_a_command(
    capsys: pytest.CaptureFixture[str], cause: str, code: int
) -> None:
    async with FakeDaemon() as daemon:
        answer = EXPLAINED | {"cause": cause, "others": [OTHER | {"behind": None}]}

        async def explain(*options: str) -> int:
            arguments = ["explain", "7", "--url", daemon.url, *options]
            showing = asyncio.create_task(asyncio.to_thread(run, arguments))
            peer = await daemon.peer()
            frame = await peer.next(T.EXPLAIN)
            assert frame[2] == 7
            peer.ok(frame, answer)
            return await showing

        assert await explain() == code
        assert capsys.readouterr().out.splitlines() == [
            f"{cause.replace('_', ' ')}: It waits\\x1b.", "  tickwheel explain 5", "",
            "leased: It is with w.",
        ]  # fmt: skip
        assert await explain("--json") == code
        outcome = json.loads(capsys.readouterr().out)
    assert (outcome["id"], outcome["behind"], outcome["others"][0]["behind"]) == ("7", "5", None)


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["cancelled"], 0), ([], 0), (["unknown"], 4), (["gone", "cancelled"], 4),
        (["in_flight"], 1), (["unknown", "in_flight"], 1),
    ],
)  # fmt: skip
def test_statuses_of_many_ids_are_summarised(statuses: list[str], code: int) -> None:
    assert verdict(statuses, {"cancelled"}) == code
