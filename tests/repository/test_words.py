"""One word for one thing, wherever somebody reads it: documents, commands, metrics, console."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tickwheel.api.frames import FrameType
from tickwheel.cli.output import STATES
from tickwheel.cli.tasks import STATES as OF_A_TASK
from tickwheel.server.metrics.catalogue import GROUP, TOPIC

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "tickwheel/server/http/console"
OTHERS = {
    # In code spans it is what a nack is answered with: a verdict, and no state.
    r"(?<![`\"'])\bretrying\b": "waiting",
    r"\b(?:rotations?|turns?|rounds?) left\b": "cycles left",
    r"\brotations_left\b|\bcycles_left\b|\bcycle_num\b": "cycles",
}
"""What must not be said of a task, and the word for it."""


def _strings(path: Path) -> Iterator[str]:
    """Texts of a program: help, heads of columns, messages."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _values(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for one in found:
            yield from _values(one)
    elif isinstance(found, str):
        yield found


def _read_by_people() -> Iterator[tuple[Path, str]]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        yield from ((path, line) for line in path.read_text("utf-8").splitlines())
    for folder in ("tickwheel/cli", "tickwheel/server/metrics"):
        for path in sorted((ROOT / folder).glob("*.py")):
            yield from ((path, text) for text in _strings(path))
    for path in sorted((ROOT / "grafana").rglob("*.json")):
        yield from ((path, text) for text in _values(json.loads(path.read_text("utf-8"))))
    for path in sorted(CONSOLE.glob("*.js")):
        yield from ((path, line) for line in path.read_text("utf-8").splitlines())


@pytest.mark.parametrize(("other", "word"), OTHERS.items(), ids=OTHERS.values())
def test_a_state_of_a_task_has_one_word(other: str, word: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text.strip()[:100]}"
        for path, text in _read_by_people()
        if re.search(other, text, re.IGNORECASE)
    ]
    assert not found, f"the word is {word!r}"


def test_the_places_that_are_read_are_there() -> None:
    """Or the test above would find nothing in nothing."""
    read = {path.relative_to(ROOT).parts[0] for path, _ in _read_by_people()}
    assert {"docs", "tickwheel", "grafana"} <= read
    assert any("waiting" in text for path, text in _read_by_people() if path.suffix == ".json")


def test_metrics_are_called_as_the_columns_of_the_command_line() -> None:
    metrics = {metric.name for metric in (*TOPIC, *GROUP)}
    assert {f"tickwheel_{state}_tasks" for state in STATES} <= metrics


def test_the_console_calls_states_as_the_command_line_does() -> None:
    listed = re.search(r"const STATES = (\[\[.*?\]\]);", (CONSOLE / "tasks.js").read_text("utf-8"))
    assert listed is not None
    states = {value: label for value, label in json.loads(listed[1]) if value}
    assert tuple(states) == OF_A_TASK
    for value, label in states.items():
        assert label == value.replace("_", " ").capitalize()


OF_SQL = {"COMMIT", "ROLLBACK"}
OF_A_HANDSHAKE = {"HELLO", "PING"}
"""Named to whoever writes a client: no command or method stands for them."""
FRAMES = re.compile(rf"\b(?:{'|'.join({t.name for t in FrameType} - OF_SQL - OF_A_HANDSHAKE)})s?\b")
OF_THE_PROTOCOL = {"errors.py", "frames.py", "protocol.py", "verb.py"}
"""Files that describe the protocol; of ``tcp`` the frames of a program that speaks it wrongly."""


def _messages(path: Path) -> Iterator[str]:
    """The texts of what a program raises, logs, or says behind ``said =``."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        is_logged = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"debug", "info", "warning", "error", "overdue", "remark"}
        )
        is_noted = isinstance(node, (ast.Assign, ast.Return)) and isinstance(
            node.value, (ast.JoinedStr, ast.Constant, ast.Tuple)
        )
        if is_logged or is_noted or isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
                elif isinstance(part, ast.FormattedValue):
                    yield ast.unparse(part.value)


def test_a_message_names_a_command_or_a_method_and_no_frame() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / "tickwheel").rglob("*.py"))
        if path.name not in OF_THE_PROTOCOL and "tcp" not in path.parts
        for text in _messages(path)
        if (FRAMES.search(text) and " " in text.strip()) or text == "self.kind.name"
    ]
    assert not found, found


NEWER_CURL = {"--json": "7.82", "--fail-with-body": "7.76"}
"""Options that curl 7.74, which Debian 11 has, does not know, and the first release that does."""


@pytest.mark.parametrize(("option", "version"), NEWER_CURL.items(), ids=NEWER_CURL)
def test_a_page_says_which_curl_its_examples_need(option: str, version: str) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    uses = re.compile(rf"\bcurl\b.* {option}\b")
    found = [page for page in pages if uses.search(page.read_text("utf-8"))]
    silent = [page.name for page in found if f"curl {version}" not in page.read_text("utf-8")]
    assert not silent, silent
