"""Encrypted and compressed bodies in a real daemon: what is written anywhere, and what people see.

The bodies are looked for as they are, as base64 and as hex, in every file of the daemon's folder.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from support.daemon import Daemon
from support.history_daemon import daemon_in, taken_up
from support.waiting import comes
from tickwheel import Client, Delivery, Reject, Retry, Task, Worker

KEYS = {"2026-11": b"n" * 32, "2026-10": b"o" * 32}
SECRET = b"the-secret-of-Ann-4711"
HOUR_S = 3_600


def keys_file(path: Path, keys: dict[str, bytes]) -> str:
    lines = [f"{name} {base64.b64encode(key).decode()}\n" for name, key in keys.items()]
    path.write_text("".join(lines))
    path.chmod(0o600)
    return str(path)


def forms(secret: bytes) -> list[bytes]:
    """The secret, and what of it is left in base64 whatever stands before it, and as hex."""
    results = [secret, secret.hex().encode(), repr(secret.decode()).encode()[1:-1]]
    for before in range(3):
        text = base64.b64encode(b"\0" * before + secret)
        results.append(text[(before and 4) : len(text) - 4])
    return results


def written(folder: Path) -> dict[Path, bytes]:
    """What every file holds; archives are opened."""
    result = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # what the history has taken up is removed
            if path.is_file():
                data = path.read_bytes()
                result[path] = gzip.decompress(data) if path.suffix == ".gz" else data
    return result


def holding(folder: Path, secret: bytes) -> list[Path]:
    looked_for = forms(secret)
    return [path for path, data in written(folder).items() if any(it in data for it in looked_for)]


async def put_through(daemon: Daemon, client: Client, log: list[str]) -> None:
    """Success, failure with the body in the exception's message, dead letters of both kinds, a
    schedule, a transaction, and tasks that stay."""
    worker = Worker(client, signals=False)

    @worker.on("t", group="g", retry=Retry.fixed(0.01, retries=1))
    async def handle(delivery: Delivery) -> None:
        log.append(delivery.body.decode())
        if delivery.tag == "reject":
            raise Reject(delivery.body.decode())
        if delivery.tag == "fail":
            raise ValueError(f"cannot do {delivery.body!r}") from KeyError(delivery.body.decode())

    @worker.task("typed", group="g", retry=Retry.none())
    async def typed(name: str) -> None:
        raise RuntimeError(name)

    for tag in ("succeed", "fail", "reject"):
        await client.enqueue("t", SECRET + b" " + tag.encode(), tag=tag)
    await client.enqueue_columns("t", [SECRET * 500])
    async with client.transaction("p") as transaction:
        await transaction.enqueue("t", SECRET + b" half")
    await client.put_schedule("s", topic="t", body=SECRET + b" run", every=HOUR_S)
    await client.run_schedule("s")
    await client.enqueue_many(
        [Task("t", SECRET, delay=HOUR_S), Task("t", SECRET, delay=2 * HOUR_S)]
    )
    await client.enqueue("wrong", b"{}", encoding="json")
    running = asyncio.create_task(worker.run())
    await typed.enqueue(name=SECRET.decode())

    async def is_over() -> bool:
        letters = [letter async for letter in client.dead_list()]
        return len(letters) == 3 and len(log) >= 7

    await comes(is_over)
    worker.stop()
    await running


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_encrypted_bodies_are_never_written_in_plain_text(
    tmp_path: Path, is_encrypted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    daemon = daemon_in(tmp_path, audit_file=tmp_path / "audit.jsonl", log_level="debug")
    log: list[str] = []
    await daemon.astart()
    keys = KEYS if is_encrypted else None
    async with Client(daemon.url, keys=keys, compress_over=4096) as client:
        await put_through(daemon, client, log)
        letters = [letter async for letter in client.dead_list()]
        told = [str(letter.raw) + str((await client.lookup(letter.id)).raw) for letter in letters]
        await daemon.akill()  # the write-ahead log is as it was
        assert any(path.name.endswith("-wal") for path in written(tmp_path))
        result = holding(tmp_path, SECRET)
        await daemon.astart()
        await client.cancel(topic="t", key="none")
        await daemon.aterminate()
    await taken_up(tmp_path / "history")
    result += holding(tmp_path, SECRET)
    assert SECRET.decode() in "".join(log), "the handler has read it"
    heard = "".join(told) + caplog.text + daemon.log_text()
    if is_encrypted:
        assert result == [] and SECRET.decode() not in heard
        for kind in ("ValueError", "Reject", "RuntimeError"):
            assert kind in heard
        assert re.search(r"File \S+test_encrypted\.py\S+, line \d+, in handle", heard)
    else:  # so it would have been found
        names = {path.name.partition("-")[0] for path in result}
        assert len(names) > 1 and SECRET.decode() in heard, result


def test_the_command_line_decrypts_with_its_keys(
    make_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    daemon.start()
    cli, path = Cli(daemon), keys_file(tmp_path / "keys", KEYS)
    later = ("--delay", "1h", "--encoding", "json")
    sealed = cli.one("enqueue", "t", '{"n": 1}', *later, "--keys-file", path)["id"]
    packed = zlib.compress(b"packed " * 99)
    line = {"topic": "t", "body_base64": base64.b64encode(packed).decode(), "encoding": "zlib"}
    (made,) = cli.json("enqueue", "--from", "-", "--delay", "1h", stdin=json.dumps(line).encode())
    shown = cli.one("show", sealed)
    assert shown["encoding"] == "json,aesgcm;key=2026-11" and "body_base64" in shown
    assert "encrypted with key 2026-11" in cli.run("show", sealed).stdout.decode()
    assert "encrypted with key 2026-11" in cli.run("list", "--topic", "t").stdout.decode()
    shown = cli.one("show", sealed, "--keys-file", path)
    assert (shown["body"], shown["encoding"]) == ('{"n": 1}', "json")
    assert shown["stored_encoding"] == "json,aesgcm;key=2026-11"
    assert '{"n": 1}' in cli.run("--keys-file", path, "list", "--topic", "t").stdout.decode()
    shown = cli.one("show", made["id"])
    assert (shown["body"], shown["encoding"]) == ("packed " * 99, None)
    cli.run("run-now", sealed)
    cli.run("run-now", made["id"])
    errors = cli.run("subscribe", "t", "--max", "2", expect=1).stderr.decode()
    assert "undecodable" in errors and "'2026-11', which this client does not have" in errors
    monkeypatch.setenv("TICKWHEEL_KEYS_FILE", path)
    got = cli.json("subscribe", "t", "--max", "2" if "packed" not in errors else "1")
    assert '{"n": 1}' in [entry["body"] for entry in got]
    assert all("aesgcm" not in item.get("encoding", "") for item in got)
    os.chmod(path, 0o644)
    assert "its mode must be 0600 or stricter, not 0644" in cli.fails(2, "show", sealed)


def test_the_command_line_rejects_undecodable_bodies(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    daemon.start()
    cli = Cli(daemon)
    cli.run("groups", "create", "t", "g")
    bad = cli.one("enqueue", "t", "no zlib", "--encoding", "zlib")["id"]
    cli.run("enqueue", "t", "right")
    done = cli.run("subscribe", "t", "--group", "g", "--max", "2", "--json")
    assert [json.loads(line)["body"] for line in done.stdout.splitlines()] == ["right"]
    assert f"task {bad}: bad_body: the body is not valid zlib" in done.stderr.decode()
    (letter,) = cli.json("dead", "list")
    assert (letter["id"], letter["reason"][:8]) == (bad, "BadBody:")
    assert "the body is not valid zlib" in cli.run("show", bad).stdout.decode()


def test_schedules_on_the_command_line_are_packed_and_shown(
    make_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    daemon.start()
    cli = Cli(daemon)
    monkeypatch.setenv("TICKWHEEL_KEYS_FILE", keys_file(tmp_path / "keys", KEYS))
    put = ("schedule", "put", "s", "--topic", "t", "--every", "1h", "--body", "hi")
    assert [cli.one(*put)["outcome"] for _ in range(2)] == ["created", "unchanged"]
    (tmp_path / "s.toml").write_text('[schedule.s]\ntopic = "t"\nevery = "1h"\nbody = "hi"\n')
    assert "create" not in cli.run("schedule", "apply", str(tmp_path / "s.toml")).stdout.decode()
    shown: dict[str, Any] = cli.one("schedule", "show", "s")
    assert (shown["body"], shown["stored_encoding"]) == ("hi", "aesgcm;key=2026-11")
    monkeypatch.delenv("TICKWHEEL_KEYS_FILE")
    shown = cli.one("schedule", "show", "s")
    assert "body_base64" in shown and shown["task"]["encoding"] == "aesgcm;key=2026-11"
    assert "encrypted with key 2026-11" in cli.run("schedule", "show", "s").stdout.decode()


def test_a_key_rotation_reads_bodies_of_both_keys(make_daemon: Callable[..., Daemon]) -> None:
    async def rotate(url: str) -> list[bytes]:
        old, new = {"2026-10": KEYS["2026-10"]}, KEYS
        async with Client(url, keys=old) as before, Client(url, keys=new) as after:
            await before.enqueue("t", b"before")
            await after.enqueue("t", b"after")
            deliveries: list[Delivery] = []
            while len(deliveries) < 2:
                deliveries += await after.pull("t", wait=10)
            assert [delivery.encrypted_with for delivery in deliveries] == ["2026-10", "2026-11"]
            return [delivery.body for delivery in deliveries]

    daemon = make_daemon()
    daemon.start()
    assert asyncio.run(rotate(daemon.url)) == [b"before", b"after"]
