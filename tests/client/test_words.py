"""The words that verbs take and answer: as the protocol has them, and checked before a run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from tickwheel.api import frames as words
from tickwheel.client.subscription import MANUAL, ON_DELIVERY
from tickwheel.model import policies
from tickwheel.model.kinds import BulkState
from tickwheel.model.policies import Merging
from tickwheel.model.records import ORDER_FAILURES

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = {
    "ACK": words.AckWord,
    "NACK": words.NackWord,
    "REJECT": words.RejectWord,
    "SNOOZE": words.SnoozeWord,
    "EXTEND": words.ExtendWord,
    "RELEASE": words.ReleaseWord,
    "CANCEL": words.CancelWord,
    "RESCHEDULE": words.RescheduleWord,
    "RUN_NOW": words.RunNowWord,
    "DEAD_REQUEUE": words.RequeueWord,
    "DEAD_DELETE": words.DeleteWord,
}
OF_KEYS = {"RELEASE_KEY": words.ReleaseKeyWord, "SKIP_KEY": words.SkipKeyWord}


def those(kind: Any) -> set[str]:
    """The words of a Literal, or of a union of several."""
    args = get_args(kind)
    return {item for part in args for item in ({part} if isinstance(part, str) else those(part))}


def told() -> dict[str, set[str]]:
    """The words that docs/protocol.md has in answer to each request."""
    text = (ROOT / "docs" / "protocol.md").read_text().partition("### Outcomes")[2]
    text = text.partition("\n### ")[0]
    result: dict[str, set[str]] = {}
    for word, requests in re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, re.MULTILINE):
        named = set(re.findall(r"[A-Z][A-Z_]+", requests)) & (ANSWERS.keys() | OF_KEYS)
        if requests.startswith("all") or "others" in requests:
            named |= ANSWERS.keys()
        for request in named:
            result.setdefault(request, set()).add(word)
    return result


@pytest.mark.parametrize("request_", [*ANSWERS, *OF_KEYS])
def test_typed_answers_match_the_protocol(request_: str) -> None:
    assert those((ANSWERS | OF_KEYS)[request_]) == told()[request_]


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (words.Action, policies.ACTIONS),
        (words.UniqueUntil, policies.UNTIL),
        (words.Replaces, policies.REPLACES),
        (words.DueOf, policies.DUES),
        (words.Outcome, [item.word for item in Merging]),
        (words.AckMode, [MANUAL, ON_DELIVERY]),
        (words.OrderFailure, ORDER_FAILURES),
        (words.BulkState, [item.name.lower() for item in BulkState]),
    ],
)
def test_typed_choices_match_the_daemon(kind: Any, known: Any) -> None:
    assert those(kind) == set(known)


PROGRAM = """
import tickwheel
from tickwheel import sync

async def handles(client: tickwheel.Client, delivery: tickwheel.Delivery) -> None:
    if await delivery.ack() == "{ack}":
        await delivery.nack()
    if await delivery.nack() == "retrying":
        pass
    receipt = await client.enqueue("t", b"", key="k", if_pending="{action}")
    if receipt.outcome == "{outcome}":
        pass
    await client.create_group("t", "g", order_failure="{failure}")
    async for task in client.list_tasks(state="{state}"):
        pass

def in_a_thread(client: sync.Client, delivery: sync.Delivery) -> None:
    if delivery.ack() == "{ack}":
        client.enqueue("t", b"", if_pending="{action}")
"""
RIGHT = {
    "ack": "acked", "action": "keep", "outcome": "kept", "failure": "hold", "state": "waiting",
}  # fmt: skip
WRONG = {name: f"{word}_" for name, word in RIGHT.items()}
MISTAKES = 7
"""Places where PROGRAM has one of the words."""


@pytest.mark.parametrize(("said", "mistakes"), [(RIGHT, 0), (WRONG, MISTAKES)])
def test_a_type_checker_finds_misspelt_choices(
    tmp_path: Path, said: dict[str, str], mistakes: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(**said))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(lines) == mistakes, done.stdout + done.stderr
    assert all("comparison-overlap" in line or "arg-type" in line for line in lines)
