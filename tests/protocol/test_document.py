"""docs/protocol.md says what the code does: types, codes, limits, counts, and bytes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.raw import Raw
from tickwheel import errors
from tickwheel.api.frames import FrameType
from tickwheel.model.policies import ACTIONS, RULE_FIELDS
from tickwheel.persistence import open_election
from tickwheel.protocol import Decoder, encode
from tickwheel.server.http.pages import document
from tickwheel.server.http.routes import ROUTES


def read(name: str) -> str:
    return (Path(__file__).parents[2] / "docs" / name).read_text()


TEXT = read("protocol.md")


def section(title: str, text: str = TEXT) -> str:
    """From a heading to the next one."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"the document has no section {title!r}"
    return match[1]


def rows(text: str) -> list[list[str]]:
    """Cells of the tables in it, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raw]:
    with Daemon(tmp_path_factory.mktemp("document")) as daemon, Raw(daemon.port) as raw:
        yield raw


def test_the_document_lists_every_frame_type() -> None:
    documented = {}
    for title in ("Frames from the client", "Frames from the daemon"):
        documented |= {int(row[0]): row[1] for row in rows(section(title)) if row[0].isdigit()}
    assert documented == {kind.value: kind.name for kind in FrameType}


def test_the_document_names_the_stores_with_a_lease() -> None:
    [text] = [row[2] for row in rows(section("Frames from the daemon")) if row[1] == "LEASE"]
    stores = {"Redis": "redis://h/0", "PostgreSQL": "postgresql://h/x", "SQLite": "sqlite:///x.db"}
    for name, url in stores.items():
        assert (name in text) == (open_election(url, 1_000) is not None), name


def test_the_document_describes_every_error_code() -> None:
    documented = {
        row[0].strip("`"): row[1:4] for row in rows(section("Errors")) if row[0][0] == "`"
    }
    known = {
        code: [
            "yes" if kind.retryable else "no",
            "yes" if kind.closes_connection else "no",
            str(kind.http_status),
        ]
        for code, kind in errors.BY_CODE.items()
    }
    assert documented == known


@pytest.mark.parametrize(
    ("name", "title", "unit"),
    [("protocol.md", "Keys that are pending", "_ms"), ("keys.md", "What is pending", "")],
)
def test_the_documents_say_to_which_actions_an_option_belongs(
    name: str, title: str, unit: str
) -> None:
    table = {row[0].strip("`"): row[1] for row in rows(section(title, read(name)))}
    for field in dict.fromkeys(field for fields in RULE_FIELDS.values() for field in fields):
        actions = [action for action in ACTIONS if field in RULE_FIELDS[action]]
        expected = ", ".join(f"`{action}`" for action in actions)
        if len(actions) == len(ACTIONS) - 1:
            expected = "all but `add`"
        assert table[re.sub("_ms$", unit, field)] == expected


def test_the_documents_name_the_errors_after_which_a_request_may_be_executed() -> None:
    uncertain = [code for code, kind in errors.BY_CODE.items() if kind.retryable and kind.uncertain]
    [of_http] = re.findall(r"changed nothing, except perhaps after (.*?):", read("http.md"))
    assert names(of_http) == uncertain
    [of_frames] = re.findall(r"changed nothing, with two exceptions: (.*)", TEXT)
    assert set(names(of_frames)) == set(uncertain) - {"connection_lost", "send_timeout"}
    problem = document(ROUTES)["components"]["schemas"]["Problem"]["properties"]["retryable"]
    assert problem["description"].endswith(f"except perhaps after {', '.join(uncertain)}.")


def test_the_document_lists_every_limit_with_its_default(running: Raw) -> None:
    documented = {row[0].strip("`"): row[1] for row in rows(section("Limits")) if row[0][0] == "`"}
    assert documented == {name: str(value) for name, value in running.limits.items()}


def test_the_document_lists_every_field_of_stats(running: Raw) -> None:
    running.enqueue(("t", b"x", 0))
    running.call(FrameType.SUBSCRIBE, 1, "t", "g", 0, {"tags": "eu", "where": "TRUE"})
    stats = running.call(FrameType.STATS)[2]
    table = rows(section("Inspecting tasks"))
    documented = {name for row in table[1:] for name in re.findall(r"`(\w+)`", row[0])}
    assert documented == set(stats)
    inner = {re.findall(r"`(\w+)`", row[0])[0]: set(names(row[1])) for row in table[1:]}
    assert inner["lateness"] == set(stats["lateness"])
    assert inner["topics"] == set(stats["topics"]["t"])
    groups = re.search(r"^`groups` maps .*$", section("Inspecting tasks"), re.MULTILINE)
    assert groups is not None
    assert set(names(groups[0])) - {"groups"} == set(stats["topics"]["t"]["groups"]["g"])


def names(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def test_the_document_lists_every_field_of_a_task(running: Raw) -> None:
    task_id = running.enqueue(("t", b"x", 60_000))[2][1][0]
    result = running.call(FrameType.LOOKUP, [task_id])[2][0]
    paragraph = (
        section("Inspecting tasks").partition("**task map**")[2].partition("**dead map**")[0]
    )
    assert set(result) <= set(names(paragraph))


def test_the_document_lists_every_status(running: Raw) -> None:
    words = {name for row in rows(section("Outcomes"))[1:] for name in names(row[0])}
    task_id = running.enqueue(("w", b"x", 60_000))[2][1][0]
    asked = [running.call(FrameType.CANCEL, [task_id])[2][0][1:] for _ in range(2)]
    asked.append(running.call(FrameType.NACK, "w", None, [(task_id, 1, 1, None, None)])[2])
    asked.append(running.call(FrameType.ACK, "w", "g", 1, [1 << 60], [1])[2])
    texts = {word for answer in asked for word in answer}
    assert texts == {"cancelled", "already_cancelled", "unknown"}
    assert texts <= words


def example() -> list[tuple[tuple[Any, ...], bytes]]:
    block = section("Example").partition("```\n")[2].partition("```")[0]
    results: list[tuple[tuple[Any, ...], bytes]] = []
    for line in block.splitlines():
        if line.startswith(("C ", "D ")):
            results.append((ast.literal_eval(line[2:]), b""))
        else:
            frame, data = results[-1]
            results[-1] = frame, data + bytes.fromhex(line)
    return results


def test_the_documents_example_is_exact() -> None:
    result = example()
    assert [frame[0] for frame, _ in result] == [1, 65, 2, 65, 4, 65, 67, 8, 65]
    for frame, data in result:
        assert encode(frame).hex(" ") == data.hex(" ")
        [decoded] = Decoder(4096).feed(data)
        assert encode(decoded) == data


def test_a_daemon_accepts_the_documents_example(running: Raw) -> None:
    """Only examples without ids, which the daemon chooses."""
    sent = [data for frame, data in example() if frame[0] in (1, 2, 4)]
    with Raw(running.socket.getpeername()[1], hello=False) as raw:
        raw.send_bytes(b"".join(sent))
        frames = [raw.next() for _ in range(4)]
    assert sorted(frame[0] for frame in frames) == [65, 65, 65, 67]
    [delivery] = next(frame[4] for frame in frames if frame[0] == FrameType.DELIVER)
    assert delivery[3] == b"hello"
