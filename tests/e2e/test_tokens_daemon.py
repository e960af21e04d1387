"""Tokens with rights against real daemons: made, used, revoked while it runs, and broken."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cli_runner import Cli
from support.daemon import Daemon
from support.raw import Raw
from support.waiting import soon
from tickwheel import Client, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.server.access import tokens

HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("tokens") / "tokens.json"
    create(result, "first", "all")
    return result


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), http=True, tokens_file=str(path)) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


def create(path: Path, name: str, *scopes: str) -> str:
    return tokens.create(path, name, tokens.parse_scopes(scopes), 1, None)[1]


def known(daemon: Daemon, token: str) -> Raw:
    """A connection with a token, as soon as the daemon has read it."""
    while True:
        raw = Raw(daemon.port, hello=False)
        if raw.hello(token=token)[0] == T.OK:
            return raw
        raw.socket.close()  # the wrong one has waited already


def made(cli: Cli, path: Path, *arguments: str) -> str:
    return str(cli.one("token", "create", *arguments, "--file", str(path))["token"])


async def test_a_revoked_token_ends_its_connections(running: Daemon, path: Path) -> None:
    cli = Cli(running)
    token = made(cli, path, "leaver", "--scope", "all")
    with known(running, token) as raw:
        async with Client(running.url, token=token) as client:
            await client.enqueue("t", b"1", delay=3600)
            cli.run("token", "revoke", "leaver", "--file", str(path))
            frame = await asyncio.to_thread(raw.next)
            assert frame[:2] == (T.GOODBYE, "unauthorized")
            with pytest.raises(EOFError):
                raw.next()
            with pytest.raises(errors.TickwheelError):
                await soon(client.enqueue("t", b"2", delay=3600, timeout=1))
        with pytest.raises(errors.Unauthorized):
            await soon(Client(running.url, token=token).connect())
    assert cli.fails(1, "--token", token, "stats").startswith("tickwheel: unauthorized: ")


def test_packed_ids_of_other_topics_are_unknown(running: Daemon, path: Path) -> None:
    """Tasks with nothing but a body, or a key, are stored many to a row, and looked at at once."""
    owner = known(running, create(path, "owner", "all"))
    guest = known(running, create(path, "guest", "all=ours.*"))
    with owner, guest:
        topics = ("theirs", "ours.a") * 100
        many = tuple(
            (topic, b"", HOUR_MS, {"key": f"k{n}"} if n < 100 else {})
            for n, topic in enumerate(topics)
        )
        ids = owner.enqueue(*many)[2][1]
        moved = guest.call(T.RESCHEDULE, ids, {"delay_ms": 2 * HOUR_MS})[2]
        assert {row[1] for row in moved[::2]} == {"unknown"}
        assert {row[1] for row in moved[1::2]} == {"scheduled"}
        words = [row[1] for row in guest.call(T.CANCEL, ids)[2]]
        assert set(words[::2]) == {"unknown"} and set(words[1::2]) == {"cancelled"}
        states = [task["state"] for task in owner.call(T.LOOKUP, ids)[2]]
        assert states == ["scheduled", "cancelled"] * 100
        listed = guest.call(T.LIST, {})[2]["tasks"]
        assert listed == ()


def test_the_command_line_names_the_right_that_is_missing(running: Daemon, path: Path) -> None:
    cli = Cli(running)
    token = made(cli, path, "producer", "--scope", "produce=orders.*")
    known(running, token).socket.close()
    cli.run("--token", token, "enqueue", "orders.eu", "x", "--delay", "1h")
    message = cli.fails(1, "--token", token, "enqueue", "mails", "x")
    assert message == (
        "tickwheel: forbidden: token producer may not do this: the right produce is required for"
        " topic 'mails'\n"
    )
    assert "needs the right read" in cli.fails(1, "--token", token, "stats")
    shown = {entry["name"]: entry for entry in cli.json("token", "list", "--file", str(path))}
    assert shown["producer"]["scopes"] == {"produce": ["orders.*"]}
    assert token.split("_", 2)[2] not in json.dumps(shown)


def test_last_use_is_stored_at_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token = create(path, "somebody", "all")
    with Daemon(tmp_path / "daemon", tokens_file=str(path)) as daemon:
        Raw(daemon.port, token=token).socket.close()
        assert daemon.terminate() == 0
    (token_id,) = tokens.read_used(path)
    assert token.startswith(f"tw_{token_id}_")
    assert tokens.read_used(path)[token_id] > 1_600_000_000_000


def test_secrets_appear_in_no_output(tmp_path: Path) -> None:
    """Command line, log, metrics, answers, audit log, files: also not one that is nearly right."""
    path, audit = tmp_path / "tokens.json", tmp_path / "audit.jsonl"
    token = create(path, "somebody", "all")
    settings = {"tokens_file": str(path), "audit_file": str(audit), "log_level": "debug"}
    env = {"TICKWHEEL_SERVE_TOKEN": "the-one-password"}
    nearly = token[:-3] + "xyz"
    with Daemon(tmp_path / "daemon", http=True, env=env, **settings) as daemon:
        command_line = Path(f"/proc/{daemon.pid}/cmdline").read_text()
        texts = []
        for shown in (nearly, "the-one-passwords", token, "the-one-password"):
            raw = Raw(daemon.port, hello=False)
            with raw:
                texts.append(repr(raw.hello(token=shown)))
                if shown in (token, "the-one-password"):
                    texts.append(repr(raw.call(T.GROUP_CREATE, "t", "g", {})))
                    texts.append(repr(raw.call(T.STATUS)) + repr(raw.call(T.STATS)))
            headers = {"Authorization": f"Bearer {shown}"}
            request = urllib.request.Request(f"{daemon.http}/v1/stats", headers=headers)  # noqa: S310
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                    texts.append(answer.read().decode())
            except urllib.error.HTTPError as error:
                texts.append(error.read().decode())
        with urllib.request.urlopen(f"{daemon.http}/metrics", timeout=30) as answer:  # noqa: S310
            texts.append(answer.read().decode())
        assert daemon.terminate() == 0
        files = [file for file in daemon.folder.rglob("*") if file.is_file()]
        data = b"".join(file.read_bytes() for file in (*files, path, audit))
        data += "".join((command_line, daemon.log_text(), *texts)).encode()
    assert b"token somebody" in data and b"create_group" in data
    for secret in (nearly, token, "the-one-password"):
        assert secret.split("_", 2)[-1].encode() not in data
