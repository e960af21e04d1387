"""Commands that follow from the declarations of their verbs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from support.fake_daemon import FakeDaemon
from tickwheel.api.frames import FrameType as T
from tickwheel.api.shapes import Block
from tickwheel.api.verbs import VERBS
from tickwheel.cli.app import app, run

DECLARED = [verb for verb in VERBS.values() if verb.command]
TARGET = {
    "topic": "t", "group": "g", "kind": "push", "url": "https://one.example/", "since_ms": 0,
    "by": "me", "state": "starting",
}  # fmt: skip


@pytest.mark.parametrize("verb", DECLARED, ids=lambda verb: verb.name)
def test_declared_commands_have_their_arguments_and_options(verb: Any) -> None:
    result: Any = typer.main.get_command(app)
    words = verb.command.split()
    for word in words:
        if not word.isupper():
            result = result.commands[word]
    arguments = [param for param in result.params if param.param_type_name == "argument"]
    options = {param.name for param in result.params} - {argument.name for argument in arguments}
    shared = {"url", "token", "keys_file", "as_json"}
    assert [argument.metavar for argument in arguments] == [
        word for word in words if word.isupper()
    ]
    fields = {field.name: field for field in verb.request_type.fields()}
    if verb.pages:
        del fields["after"]
    if "task" in fields:
        block = cast("Block", fields.pop("task").kind)
        fields |= {f"task.{field.name}": field for field in block.block.fields()}
    assert len(options - shared) == len(fields) - len(arguments)
    assert result.help and "Raise " not in result.help and "``" not in result.help


async def test_push_set_sends_its_options_as_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("# the new one first\nwhsec_one\nwhsec_two\n")
    text = "push set t g --to https://one.example/ --request-timeout 2s --concurrency 3"
    async with FakeDaemon() as daemon:
        words = [*text.split(), "--secret-file", str(secrets), "--json", "--url", daemon.url]
        asking = asyncio.create_task(asyncio.to_thread(run, words))
        peer = await daemon.peer()
        frame = await peer.next(T.PUSH_SET)
        peer.ok(frame, TARGET)
        assert await asking == 0
    assert frame[2:5] == ("t", "g", "https://one.example/")
    options = frame[5]
    assert options["secrets"] == ("whsec_one", "whsec_two")
    assert (options["request_timeout_ms"], options["concurrency"]) == (2_000, 3)
    assert "connect_timeout_ms" not in options
    shown = json.loads(capsys.readouterr().out)
    assert shown == TARGET | {"since": "1970-01-01T00:00:00.000Z"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("push set t g --to https://one.example/ --concurrency 0", "--concurrency"),
        ("push resend t g none", "NUMBER"),
        ("schedule show daily --next 101", "--next"),
        ("schedule backfill daily --from 2030-01-31T09:00Z", "--to"),
        ("schedule backfill daily --from never --to 2030-01-31T09:00Z", "--from"),
    ],
)
def test_an_option_out_of_bounds_is_a_usage_error(
    words: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words.split(), "--url", "127.0.0.1:1"]) == 2
    assert problem in capsys.readouterr().err
