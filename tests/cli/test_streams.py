"""Standard streams that are closed or full, and what is read from them: never a traceback."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tickwheel.api.bulk import BulkInfo
from tickwheel.cli import enqueue
from tickwheel.cli.app import EXIT_INTERRUPTED, run
from tickwheel.cli.call import Call
from tickwheel.cli.enqueue import BadLine, read_tasks
from tickwheel.cli.output import Output
from tickwheel.cli.tasks import follow_bulk
from tickwheel.client import Partly, Receipt, encodings
from tickwheel.demo.demonstration import Demo
from tickwheel.errors import BadRequest, LimitExceeded, OutcomeUnknown, Overloaded

EVERY_COMMAND = """
import contextlib, io, json, os, sys
from tickwheel.cli.app import run

every, folder = int(sys.argv[1]), sys.argv[2]
os.environ["TICKWHEEL_URL"] = "tcp://127.0.0.1:1"

tried = [["--help"], ["list", "--no-such-option"]]
tried += [
    ["--version"], ["history", "--dir", folder], ["history", "--dir", folder, "--json"],
    ["restore", "--history", folder, "--into", f"sqlite:///{folder}/new.db", "--dry-run"],
    ["restore", "--history", folder, "--into", f"sqlite:///{folder}/new.db", "--dry-run", "--json"],
    ["check", "--store", f"sqlite:///{folder}/none.db"],
]
with contextlib.redirect_stdout(io.StringIO()):
    run(["--version"])  # so that every child has the modules
ways = [(stream, how) for stream in (0, 1, 2) for how in ("closed", "full")]
pairs = [(m + n, one, *way) for m, one in enumerate(tried) for n, way in enumerate(ways)]
pairs = [(one, stream, how) for n, one, stream, how in pairs if n % every == 0]
for arguments, stream, how in pairs:
    said = os.open(f"{folder}/said", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    child = os.fork()
    if not child:
        if stream != 2:
            os.dup2(said, 2)
        name = ("stdin", "stdout", "stderr")[stream]
        if how == "closed":
            os.close(stream)
            setattr(sys, name, None)
        else:
            os.dup2(os.open("/dev/full", os.O_RDWR), stream)
            setattr(sys, name, open(stream, "w" if stream else "r", closefd=False))
        sys.exit(run(arguments))
    _, status = os.waitpid(child, 0)
    text = os.pread(said, 1 << 20, 0).decode()
    os.close(said)
    code = os.waitstatus_to_exitcode(status)
    if "Traceback" in text or "Exception ignored" in text or code not in (0, 1, 2, 3):
        print(json.dumps([arguments, stream, how, code, text[-600:]]), file=sys.__stdout__)
print(json.dumps(len(pairs)), file=sys.__stdout__)
"""


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_commands_do_not_answer_a_bad_stream_with_a_traceback(tmp_path: Path, every: int) -> None:
    """Each command with some bad streams, each bad stream with some commands."""
    done = subprocess.run(
        [sys.executable, "-c", EVERY_COMMAND, str(every), str(tmp_path)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    *bad, tried = done.stdout.splitlines()[-30:]
    lines = [line for line in bad if line.startswith("[[")]
    assert not lines and int(tried) > 30 / every, "\n".join([*lines, done.stderr[-2_000:]])


def test_a_body_on_stdin_is_read_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without an end is refused when it is too long, and not read on."""
    reading, writing = os.pipe()
    with open(reading) as stdin, open(writing, "wb", 0) as pipe:
        monkeypatch.setattr(sys, "stdin", stdin)
        pipe.write(b"y" * 21)
        with pytest.raises(LimitExceeded, match=r"the limit is 10 \(body_bytes_max\)"):
            enqueue.read_stdin(10)
        pipe.close()
        assert enqueue.read_stdin(10) == b"y" * 10


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "LINE_BYTES_MAX", 40)
    lines = io.BytesIO(b'{"topic":"t","body":"a"}\n' + b"y" * 1_000)
    tasks = read_tasks(enqueue._Counted(lines), {})
    assert next(tasks)[0].topic == "t"
    with pytest.raises(BadLine, match="2.*the limit is 40"):
        next(tasks)


def test_a_file_of_keys_has_a_limit(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(b"#" * (encodings.KEYS_BYTES_MAX + 1))
    keys.chmod(0o600)
    with pytest.raises(BadRequest, match=f"more than {encodings.KEYS_BYTES_MAX} bytes"):
        encodings.read_keys(keys)
    keys.write_bytes(b"#" * encodings.KEYS_BYTES_MAX)
    assert not encodings.read_keys(keys)


async def test_an_interrupted_bulk_operation_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields: dict[str, Any] = {
        "id": "b1", "kind": "cancel", "topic": "t", "rate": None, "state": "running",
        "looked_at": 1_200, "matched": 30, "changed": 20, "refused": {}, "note": "",
    }  # fmt: skip
    asked = asyncio.Event()

    class Asked:
        async def show_bulk(self, name: str) -> Any:
            asked.set()
            await asyncio.Event().wait()

    following = asyncio.ensure_future(follow_bulk(cast("Any", Asked()), BulkInfo(**fields)))
    await asked.wait()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    answer = capsys.readouterr().err
    assert "looked at 1,200, changed 20 so far" in answer
    assert "tickwheel bulk show b1" in answer


async def test_an_interrupted_file_of_tasks_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueue, "CHUNK_TASKS", 2)
    monkeypatch.setattr(enqueue, "LAST_CHUNK_S", 0.01)
    lines = io.BytesIO(b'{"topic":"t","body":"a"}\n' * 5)
    under_way, calls = asyncio.Event(), list[int]()

    class Asked:
        async def enqueue_many(self, tasks: Any) -> Any:
            calls.append(len(tasks))
            if len(calls) > 1:
                under_way.set()
                await asyncio.Event().wait()
            return [Receipt(number, 0, "stored") for number in range(len(tasks))]

    call = Call("tcp://127.0.0.1:1", None, Output(as_json=False))
    sending = asyncio.ensure_future(
        enqueue._send(call, cast("Any", Asked()), lines, {}, lambda **_: None)
    )
    await under_way.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    answer = capsys.readouterr().err
    assert "2 tasks are stored, up to line 2; the tasks of the next 2 lines may be" in answer
    assert "(tail -n +3 FILE) | the same command with --from -" in answer


async def test_the_stored_part_of_a_chunk_that_failed_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = io.BytesIO(b'{"topic":"t","body":"a"}\n' * 4)
    ends = [Receipt(7, 0, "stored"), Overloaded("full"), OutcomeUnknown("?"), Receipt(9, 0, "kept")]

    class Asked:
        async def enqueue_many(self, tasks: Any) -> Any:
            raise Partly("2 of 4 tasks were stored", ends)

    call = Call("tcp://127.0.0.1:1", None, Output(as_json=True))
    with pytest.raises(Partly):
        await enqueue._send(call, cast("Any", Asked()), lines, {}, lambda **_: None)
    out, err = capsys.readouterr()
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["7", "9"]
    assert "2 tasks were enqueued before this error; 1 more may be stored" in err


def test_an_interrupted_demo_ends_with_the_exit_code_of_every_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def interrupted(demo: Demo) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Demo, "run", interrupted)
    assert run(["demo", "--plain"]) == EXIT_INTERRUPTED
